// CoreDNS with the plugins that a cluster of the tests uses. All of them would take five times as long to build, most of it
// for services of clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func init() {
	// In the order in which a question passes them.
	dnsserver.Directives = []string{"ready", "errors", "cache", "kubernetes"}
}

func main() {
	coremain.Run()
}
