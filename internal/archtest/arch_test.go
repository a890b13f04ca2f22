package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/varve-io/varve"

// source is one parsed file that is not a test.
type source struct {
	pkg  string // path below the module
	name string
	file *ast.File
}

func load(t *testing.T) (*token.FileSet, []source) {
	t.Helper()
	root := filepath.Join("..", "..")
	set := token.NewFileSet()
	var out []source
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			name := d.Name()
			if path != root && (strings.HasPrefix(name, ".") || name == "testdata") {
				return filepath.SkipDir
			}
			// Modules of their own (tools, foreign suites) are not part of the house.
			if path != root {
				if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
					return filepath.SkipDir
				}
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg, err := filepath.Rel(root, filepath.Dir(path))
		out = append(out, source{filepath.ToSlash(pkg), path, file})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 50 {
		t.Fatalf("only %d files found: the walk is broken", len(out))
	}
	return set, out
}

func find(pkg string) int {
	return slices.IndexFunc(Table, func(r Row) bool { return r.Path == pkg })
}

func TestImportsFollowTheTable(t *testing.T) {
	_, files := load(t)
	seen := map[string]bool{}
	for _, f := range files {
		at := find(f.pkg)
		if at < 0 {
			if !seen[f.pkg] {
				t.Errorf("package %s is not in the table of archtest", f.pkg)
			}
			seen[f.pkg] = true
			continue
		}
		seen[f.pkg] = true
		row := Table[at]
		for _, spec := range f.file.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			switch first, _, _ := strings.Cut(path, "/"); {
			case strings.HasPrefix(path, module+"/"):
				target := find(strings.TrimPrefix(path, module+"/"))
				if target < 0 || target >= at {
					t.Errorf("%s: %s may not import %s: it is not above it in the table", f.name, row.Path, path)
				} else if Table[target].Kind == Test && row.Kind != Test {
					t.Errorf("%s: %s imports the test package %s", f.name, row.Path, path)
				}
			case strings.Contains(first, "."):
				allowed := row.Modules
				if row.Kind != Core && row.Kind != Mutex {
					allowed = append(slices.Clone(allowed), everywhere...)
				}
				if row.Kind != Test && !slices.ContainsFunc(allowed, func(m string) bool { return strings.HasPrefix(path, m) }) {
					t.Errorf("%s: %s may not import %s", f.name, row.Path, path)
				}
			}
		}
	}
	for _, row := range Table {
		if !seen[row.Path] {
			t.Errorf("the table has a room with nobody in it: %s", row.Path)
		}
	}
}

// banned are selectors that bring a clock, global randomness or the outside world into a core.
var banned = map[string][]string{
	"time":         {"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"},
	"math/rand":    {"*"},
	"math/rand/v2": {"*"},
	"os":           {"*"},
	"net":          {"Dial", "Listen", "DialTimeout"},
}

func TestCoresArePure(t *testing.T) {
	set, files := load(t)
	for _, f := range files {
		at := find(f.pkg)
		if at < 0 || Table[at].Kind != Core && Table[at].Kind != Mutex {
			continue
		}
		names := map[string]string{}
		for _, spec := range f.file.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			name := path[strings.LastIndexByte(path, '/')+1:]
			if path == "math/rand/v2" {
				name = "rand"
			}
			if spec.Name != nil {
				name = spec.Name.Name
			}
			names[name] = path
		}
		ast.Inspect(f.file, func(n ast.Node) bool {
			complain := func(what string) { t.Errorf("%s: a pure core has %s", set.Position(n.Pos()), what) }
			switch n := n.(type) {
			case *ast.GoStmt:
				complain("a goroutine")
			case *ast.SelectStmt:
				// A send that cannot wait, in a core with a mutex, is how waiters are woken.
				if Table[at].Kind != Mutex || !nonBlockingSend(n) {
					complain("a select")
				}
			case *ast.UnaryExpr:
				if n.Op == token.ARROW {
					complain("a channel receive")
				}
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok {
					for _, b := range banned[names[x.Name]] {
						if b == "*" && ast.IsExported(n.Sel.Name) && !isType(n.Sel.Name) || b == n.Sel.Name {
							complain(x.Name + "." + n.Sel.Name)
						}
					}
				}
			}
			return true
		})
	}
}

// isType lets cores name types of packages whose functions they must not call.
func isType(name string) bool {
	return slices.Contains([]string{"Rand", "Source", "File", "FileInfo"}, name)
}

func nonBlockingSend(s *ast.SelectStmt) bool {
	sends, other := 0, false
	for _, c := range s.Body.List {
		switch comm := c.(*ast.CommClause).Comm.(type) {
		case nil:
			sends += 10
		case *ast.SendStmt:
			sends++
		default:
			_ = comm
			other = true
		}
	}
	return sends == 11 && !other
}
