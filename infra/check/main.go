// Loads Compose files, which are merged in order, with Compose's own loader and prints the resolved project as JSON, so that a
// test can check anchors and environment files. The loader rejects dangling references, cycles and
// undefined variables.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

func load(paths []string) (*types.Project, error) {
	// Neither shell variables nor .env are used: a variable that the files do not define is an error.
	options, err := cli.NewProjectOptions(paths, cli.WithResolvedPaths(true), cli.WithInterpolation(true))
	if err != nil {
		return nil, err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return nil, err
	}
	if project, err = project.WithServicesEnvironmentResolved(true); err != nil {
		return nil, err
	}
	return project, nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: check FILE...")
		os.Exit(2)
	}
	project, err := load(os.Args[1:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(project)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
