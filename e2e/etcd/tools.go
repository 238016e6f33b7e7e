//go:build tools

// Package tools names the program that is built.
package tools

import _ "go.etcd.io/etcd/server/v3"
