// CoreDNS with only the plugins that the tests' clusters use. With all plugins, most of them for cloud services, the build
// would take five times as long.
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
	// The order in which a query passes the plugins.
	dnsserver.Directives = []string{"ready", "errors", "cache", "kubernetes"}
}

func main() {
	coremain.Run()
}
