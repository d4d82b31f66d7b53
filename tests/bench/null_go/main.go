// The cheapest ordinary ext_proc server on grpc-go, for comparison: `null-go ADDRESS`.
//
// It does what null_server.py does: it parses each message, answers its phase with nothing and ends the stream after the body.
// One processor is all that it may use, because that is what one guard has.
package main

import (
	"errors"
	"io"
	"log"
	"net"
	"os"
	"runtime"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	headers = &extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{}},
	}
	body = &extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{}},
	}
)

type server struct {
	extproc.UnimplementedExternalProcessorServer
}

// Process is one stream, that is, one HTTP request.
func (server) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch message.Request.(type) {
		case *extproc.ProcessingRequest_RequestHeaders:
			if err := stream.Send(headers); err != nil {
				return err
			}
		case *extproc.ProcessingRequest_RequestBody:
			return stream.Send(body)
		default:
			return status.Errorf(codes.Unimplemented, "%T", message.Request)
		}
	}
}

func main() {
	runtime.GOMAXPROCS(1)
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	door := grpc.NewServer()
	extproc.RegisterExternalProcessorServer(door, server{})
	log.Fatal(door.Serve(listener))
}
