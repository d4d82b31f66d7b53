// istiod ADDRESS CONFIGS OBJECTS: Istio's own discovery server on ADDRESS, with Istio's configuration of one file and the
// objects of Kubernetes of the other, both as YAML documents. It serves until it is killed.
//
// istiod PROXY CONFIGS OBJECTS: prints what it would push to a proxy, as a list of xDS resources. PROXY is JSON.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"

	"google.golang.org/protobuf/proto"
	"istio.io/istio/pilot/pkg/features"
	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pilot/test/xds"
	"istio.io/istio/pkg/cluster"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/test"
)

// What is told of a proxy.
type told struct {
	Type      model.NodeType
	IP        string
	Namespace string
	Labels    map[string]string
}

func main() {
	place, configs, objects := os.Args[1], read(os.Args[2]), read(os.Args[3])
	features.MetadataExchange = false // a filter that only Istio's own build of Envoy has
	features.ALPNFilter = false       // as is this one
	settings := mesh.DefaultMeshConfig()
	settings.EnableAutoMtls.Value = false // no certificates are issued here
	options := xds.FakeOptions{MeshConfig: settings, ConfigString: configs, KubernetesObjectString: objects}
	prints := strings.HasPrefix(place, "{")
	if !prints {
		options.ListenerBuilder = func() (net.Listener, error) { return net.Listen("tcp", place) }
	}
	err := test.Wrap(func(t test.Failer) {
		server := xds.NewFakeDiscoveryServer(t, options)
		if prints {
			show(server, place)
			os.Exit(0)
		}
		fmt.Println("serving")
		select {}
	})
	fail(err)
}

func show(server *xds.FakeDiscoveryServer, described string) {
	var is told
	if err := json.Unmarshal([]byte(described), &is); err != nil {
		fail(err)
	}
	proxy := server.SetupProxy(&model.Proxy{
		Type:            is.Type,
		ID:              "proxy." + is.Namespace,
		IPAddresses:     []string{is.IP},
		ConfigNamespace: is.Namespace,
		Labels:          is.Labels,
		Metadata:        &model.NodeMetadata{Namespace: is.Namespace, Labels: is.Labels, ClusterID: cluster.ID("Kubernetes")},
	})
	resources := []json.RawMessage{}
	for _, listener := range server.Listeners(proxy) {
		resources = append(resources, write(listener))
	}
	for _, routes := range server.Routes(proxy) {
		resources = append(resources, write(routes))
	}
	for _, one := range server.Clusters(proxy) {
		resources = append(resources, write(one))
	}
	if err := json.NewEncoder(os.Stdout).Encode(map[string]any{"resources": resources}); err != nil {
		fail(err)
	}
}

func write(resource proto.Message) json.RawMessage {
	held, err := anypb.New(resource)
	if err != nil {
		fail(err)
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(held)
	if err != nil {
		fail(err)
	}
	return text
}

func read(name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		fail(err)
	}
	return string(text)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
