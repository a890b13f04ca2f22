// Command plugin is a fetcher plug-in: it reads segments from a folder and adds nothing to what package objectstore can do. A private
// store takes the place of open.
//
//	go build -o folder-fetcher ./direct/example/plugin
//	varve consume history --until end --direct --fetcher ./folder-fetcher --bucket varve-data/bucket
package main

import (
	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/fetcherplugin"
	"github.com/varve-io/varve/direct/objectstore"
)

func open(properties map[string]string) (direct.Fetcher, error) {
	return objectstore.Open(properties["varve.remote.bucket.url"], objectstore.Options{})
}

func main() { fetcherplugin.Serve(open) }
