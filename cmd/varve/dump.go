package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/remoteformat"
)

func dumpCommand() *cobra.Command {
	var o inspect.Options
	var asJSON bool
	var kind, decode, manifest string
	var keyPairs []string
	cmd := &cobra.Command{
		Use: "dump FILE…", Short: "Show what is in files of a broker's folder or of a bucket",
		Long: `Show what is in files of a broker's folder or of a bucket, written by Varve or by Kafka: segments (.log), their indexes,
producer snapshots, checkpoints, partition.metadata, meta.properties, and the objects of remote segments. Objects that are
compressed or encrypted are read through their manifest, which is looked for beside them.

Of a damaged file all that is intact is shown, then the position of the damage; the exit code is then 1.`,
		Example: `  varve dump varve-data/orders-0/00000000000000000000.log --records
  varve dump varve-data/orders-0/*.index varve-data/orders-0/leader-epoch-checkpoint
  varve dump varve-data/__consumer_offsets-12/00000000000000000000.log --decode offsets
  varve dump bucket/orders-…/0/00000000000000000000-….log --records --key-pair prod=private.pem`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError{errors.New("want at least one file")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, files []string) error {
			if kind != "" {
				if o.Kind = inspect.Kind(kind); !slices.Contains(inspect.Kinds(), o.Kind) {
					return usageError{fmt.Errorf("--kind %q: want one of %s", kind, kindNames())}
				}
			}
			switch decode {
			case "":
			case "offsets":
				o.Offsets = true
			default:
				return usageError{fmt.Errorf("--decode %q: want offsets", decode)}
			}
			if manifest != "" {
				b, err := os.ReadFile(manifest)
				if err != nil {
					return err
				}
				o.Manifest = b
			}
			var err error
			if o.Keys, err = readKeyPairs(keyPairs); err != nil {
				return err
			}
			return dump(cmd, files, o, asJSON)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "one line of JSON per item")
	f.BoolVarP(&o.Records, "records", "r", false, "show the records of batches too")
	f.BoolVar(&o.Full, "full", false, "show keys and values in full, however long")
	f.StringVar(&decode, "decode", "", "what the records are: offsets, for __consumer_offsets")
	f.StringVar(&kind, "kind", "", "what the files are, if their names do not tell: "+kindNames())
	f.StringVar(&manifest, "manifest", "", "the .rsm-manifest of a remote .log or .indexes, if it is not beside it")
	f.StringArrayVar(&keyPairs, "key-pair", nil, "key pair of encrypted objects, ID=PRIVATE-KEY-PEM-FILE; may be repeated")
	return cmd
}

func kindNames() string {
	var names []string
	for _, k := range inspect.Kinds() {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

// readKeyPairs reads ID=FILE flags; nil without any.
func readKeyPairs(list []string) (*remoteformat.Keyring, error) {
	files, err := pairs(list)
	if err != nil || len(files) == 0 {
		return nil, err
	}
	ring := &remoteformat.Keyring{}
	for id, file := range files {
		pem, err := os.ReadFile(*file)
		if err != nil {
			return nil, err
		}
		if err := ring.Add(id, pem, nil); err != nil {
			return nil, usageError{fmt.Errorf("--key-pair %s: %w", id, err)}
		}
	}
	return ring, nil
}

// dump shows the files one after the other; damage in one does not keep it from the next.
func dump(cmd *cobra.Command, files []string, o inspect.Options, asJSON bool) error {
	out := bufio.NewWriterSize(cmd.OutOrStdout(), 64<<10)
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	var failed []error
	for _, file := range files {
		if !asJSON && len(files) > 1 {
			fmt.Fprintf(out, "%s:\n", file)
		}
		err := inspect.File(file, o, func(i inspect.Item) error {
			if asJSON {
				return encoder.Encode(i)
			}
			_, err := fmt.Fprintln(out, i.Text())
			return err
		})
		if err != nil {
			failed = append(failed, err)
		}
		if cmd.Context().Err() != nil {
			break
		}
	}
	return errors.Join(append(failed, out.Flush())...)
}
