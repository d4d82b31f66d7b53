// istiod ADDRESS CONFIGS OBJECTS: Istio's own discovery server on ADDRESS, with Istio's configuration of one file and the
// objects of Kubernetes of the other, both as YAML documents. It serves until it is killed.
package main

import (
	"fmt"
	"net"
	"os"

	"istio.io/istio/pilot/pkg/features"
	"istio.io/istio/pilot/test/xds"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/test"
)

func main() {
	address, configs, objects := os.Args[1], read(os.Args[2]), read(os.Args[3])
	features.MetadataExchange = false // a filter that only Istio's own build of Envoy has
	features.ALPNFilter = false       // as is this one
	settings := mesh.DefaultMeshConfig()
	settings.EnableAutoMtls.Value = false // nobody hands out certificates here
	err := test.Wrap(func(t test.Failer) {
		xds.NewFakeDiscoveryServer(t, xds.FakeOptions{
			MeshConfig:             settings,
			ConfigString:           configs,
			KubernetesObjectString: objects,
			ListenerBuilder:        func() (net.Listener, error) { return net.Listen("tcp", address) },
		})
		fmt.Println("serving")
		select {}
	})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func read(name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return string(text)
}
