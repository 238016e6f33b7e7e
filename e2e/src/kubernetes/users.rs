//! Who is who in a cluster, and the files by which programs show it (kubeconfigs).
//!
//! A file holds all that it needs, keys too: it is read from where the folder of keys is not.

use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::ApiServer;
use super::certificates::{Issued, User};

/// The API server, as kubelets know it.
pub(super) const TO_KUBELETS: User<'static> = User { name: "apiserver", group: Some("system:masters") };

/// The rights of the next three are Kubernetes' own.
pub(super) const CONTROLLER_MANAGER: User<'static> =
    User { name: "system:kube-controller-manager", group: None };

pub(super) const SCHEDULER: User<'static> = User { name: "system:kube-scheduler", group: None };

/// Bound to its rights in `e2e/kubernetes/objects.yaml`.
pub(super) const PROXY: User<'static> = User { name: "system:kube-proxy", group: None };

/// Bound to its rights in `e2e/kubernetes/objects.yaml`.
pub(super) const NAMES: User<'static> = User { name: "system:coredns", group: None };

/// The group of kubelets: the node authorizer decides what each may do.
const NODES: &str = "system:nodes";

/// The name by which a kubelet is known.
pub(super) fn of_node(node: &str) -> String {
    format!("system:node:{node}")
}

/// A kubelet, by that name.
pub(super) fn kubelet(name: &str) -> User<'_> {
    User { name, group: Some(NODES) }
}

impl ApiServer {
    /// Writes the file with which programs talk to this server as a user. JSON, as which every reader of YAML takes it.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write_kubeconfig(&self, user: &User<'_>, to: &Path) {
        let Issued { certificate, key } = self.authority.user(user);
        let file = |path: PathBuf| ByteString(fs::read(path).expect("it has just been written"));
        let text: Value = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": {
                "server": self.url(),
                "certificate-authority-data": file(self.authority.file("ca.crt")),
            } }],
            "users": [{ "name": user.name, "user": {
                "client-certificate-data": file(certificate),
                "client-key-data": file(key),
            } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": user.name } }],
            "current-context": "test",
        });
        fs::write(to, format!("{text:#}\n")).expect("a file of one's own can be written");
    }
}
