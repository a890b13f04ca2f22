// Command varve is the whole of Varve in one binary: the server, and the tools that look after it. Each subcommand is a file.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes, so that scripts can tell what happened.
const (
	exitFailed = 1 // the command ran and failed
	exitUsage  = 2 // the command line makes no sense
)

// usageError is a command line that makes no sense.
type usageError struct{ error }

func main() {
	// The first signal asks the command to stop; a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err := root().ExecuteContext(ctx)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "varve:", err)
	var usage usageError
	// Cobra gives what it says of flags that are missing to nobody.
	if errors.As(err, &usage) || strings.HasPrefix(err.Error(), "required flag(s)") {
		os.Exit(exitUsage)
	}
	os.Exit(exitFailed)
}

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "varve",
		Short:         "A Kafka whose history lives in an object store",
		Long:          "Varve is a Kafka-wire-compatible log in one binary. Brokers keep the tail of each partition; finished segments move to a bucket,\nand a consumer may read them from there itself.",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cmd.AddCommand(serverCommand(), clusterCommand(), gatewayCommand(), brokerCommand(), quorumCommand(), topicCommand(), groupCommand(), txnCommand(), tierCommand(), bucketCommand(), produceCommand(), consumeCommand(), verifyCommand(), dumpCommand(), benchCommand(), versionCommand())
	return cmd
}

// version is set by the linker for releases; otherwise the module's own is told.
var version = ""

func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "devel"
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "varve", versionText()) },
	}
}

// noArgs and friends make cobra's complaints usage errors.
func noArgs(cmd *cobra.Command, args []string) error { return asUsage(cobra.NoArgs(cmd, args)) }

func exactArgs(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return usageError{fmt.Errorf("want %s, got %d arguments", what, len(args))}
		}
		return nil
	}
}

func asUsage(err error) error {
	if err != nil {
		return usageError{err}
	}
	return nil
}
