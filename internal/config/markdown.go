package config

import (
	"fmt"
	"strings"
)

// Markdown renders the tables for docs/configuration.md, which a test compares with the file.
func Markdown() string {
	var b strings.Builder
	b.WriteString(`# Configuration

This page is made from the table in internal/config; ` + "`go test ./internal/config -update`" + ` writes it anew.

Settings of a server come from the defaults, then the file given with ` + "`--config`" + ` (the syntax of server.properties), then the flags; the
later wins. An unknown key, a key given twice, or a bad value stops the start, with all problems at once. Where Kafka has several keys for one
thing, milliseconds win over minutes, and minutes over hours.

Dynamic settings may be changed while the server runs, for the whole cluster or one broker (kafka-configs, IncrementalAlterConfigs).

## Server

`)
	section(&b, Broker, true)
	b.WriteString("\n## Topics\n\nThe default of a topic config is the server setting in the last column, where there is one.\n\n")
	section(&b, Topic, false)
	b.WriteString("\n## Consumer groups\n\nThese may be set for a single group (kafka-configs `--entity-type groups`); the default is the server setting in the last column.\n\n")
	section(&b, Group, false)
	return b.String()
}

func section(b *strings.Builder, t *Table, broker bool) {
	last := "default from"
	if broker {
		last = "dynamic"
	}
	fmt.Fprintf(b, "| key | type | default | what it is for | %s |\n|---|---|---|---|---|\n", last)
	for _, k := range t.keys {
		if k.Hidden {
			continue
		}
		end := ""
		switch {
		case !broker && k.Synonym != "":
			end = "`" + k.Synonym + "`"
		case broker && k.Mode == Cluster:
			end = "yes"
		}
		def := "`" + k.Default + "`"
		if k.Default == "" {
			def = "empty"
		}
		doc := k.Doc
		if len(k.OneOf) > 0 {
			doc += " One of: " + strings.Join(k.OneOf, ", ") + "."
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n", k.Name, k.Kind, def, strings.ReplaceAll(doc, "|", `\|`), end)
	}
}
