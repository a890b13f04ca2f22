package archtest

import (
	"go/ast"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"testing"

	"go/parser"
	"go/token"
)

// TestHazardsNameTestsThatExist keeps docs/hazards.md true.
func TestHazardsNameTestsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	page, err := os.ReadFile(filepath.Join(root, "docs", "hazards.md"))
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, pattern := range []string{"internal/*/*_test.go", "internal/*/*/*_test.go", "test/*/*_test.go", "direct/*_test.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			file, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range file.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok {
					have[path.Base(filepath.ToSlash(filepath.Dir(f)))+"."+fn.Name.Name] = true
				}
			}
		}
	}
	names := regexp.MustCompile("`([a-z0-9]+\\.Test[A-Za-z0-9]+)`").FindAllSubmatch(page, -1)
	if len(names) < 25 {
		t.Fatalf("only %d tests are named", len(names))
	}
	for _, n := range names {
		if !have[string(n[1])] {
			t.Errorf("there is no %s", n[1])
		}
	}
}
