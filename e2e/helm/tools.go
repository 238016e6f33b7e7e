//go:build tools

// Package tools names the program that is built.
package tools

import _ "helm.sh/helm/v4/cmd/helm"
