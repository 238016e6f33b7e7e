//! Users of a cluster, and the kubeconfigs with which programs authenticate as them.
//!
//! A kubeconfig contains its certificates and keys, so it can be read without access to the folder of keys.

use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::ApiServer;
use super::certificates::{Issued, User};

/// The API server as a client of kubelets.
pub(super) const TO_KUBELETS: User<'static> = User { name: "apiserver", group: Some("system:masters") };

/// Kubernetes itself defines the roles of the controller manager and the scheduler.
pub(super) const CONTROLLER_MANAGER: User<'static> =
    User { name: "system:kube-controller-manager", group: None };

pub(super) const SCHEDULER: User<'static> = User { name: "system:kube-scheduler", group: None };

/// kube-proxy; `e2e/kubernetes/objects.yaml` binds its role.
pub(super) const PROXY: User<'static> = User { name: "system:kube-proxy", group: None };

/// CoreDNS; `e2e/kubernetes/objects.yaml` binds its role.
pub(super) const NAMES: User<'static> = User { name: "system:coredns", group: None };

/// The group of kubelets, which the node authorizer recognizes.
const NODES: &str = "system:nodes";

/// Returns the user name of a kubelet.
pub(super) fn of_node(node: &str) -> String {
    format!("system:node:{node}")
}

/// Returns the user of a kubelet with this user name.
pub(super) fn kubelet(name: &str) -> User<'_> {
    User { name, group: Some(NODES) }
}

impl ApiServer {
    /// Writes a kubeconfig for a user, as JSON, which is valid YAML.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_kubeconfig(&self, user: &User<'_>, to: &Path) {
        let Issued { certificate, key } = self.authority.user(user);
        let file = |path: PathBuf| ByteString(fs::read(path).expect("the file was just written"));
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
        fs::write(to, format!("{text:#}\n")).expect("the folder is writable");
    }
}
