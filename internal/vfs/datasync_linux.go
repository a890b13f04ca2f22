package vfs

import (
	"os"
	"syscall"
)

func datasync(f *os.File) error {
	for {
		if err := syscall.Fdatasync(int(f.Fd())); err != syscall.EINTR {
			if err != nil {
				err = &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
			}
			return err
		}
	}
}
