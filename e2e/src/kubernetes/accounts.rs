//! Service account tokens as pods get them, without a kubelet: the harness stores a pod that names its node
//! and requests a token bound to it. The server writes the pod's node into the token, where admission
//! policies find it.

use std::path::Path;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource, ResourceExt};
use serde_json::{Value, json};

use super::ApiServer;

/// Field manager of the objects that the harness creates.
const MANAGER: &str = "reprise-e2e";

/// Lifetime of a token: the shortest that is issued.
const TOKEN_SECONDS: i64 = 600;

/// A service account of pods.
#[derive(Clone, Copy, Debug)]
pub struct PodAccount<'a> {
    /// Namespace of the account and its pods.
    pub namespace: &'a str,
    /// Name of the service account.
    pub name: &'a str,
}

impl PodAccount<'_> {
    /// Returns the user name for role bindings.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

impl ApiServer {
    /// Returns a client of the account, as in a pod on this node. Creates namespace, account, node and pod if
    /// missing.
    ///
    /// # Panics
    /// If the server refuses a request.
    pub fn client_on_node(&self, account: PodAccount<'_>, node: &str) -> Client {
        self.client_with_token(self.token_on_node(account, node))
    }

    /// Writes a kubeconfig of the account, as for a pod on this node.
    ///
    /// # Panics
    /// If the server refuses a request, or the file cannot be written.
    pub fn kubeconfig_on_node(&self, account: PodAccount<'_>, node: &str, path: &Path) {
        let authority = self.authority.file("ca.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": { "server": self.url(), "certificate-authority": authority } }],
            "users": [{ "name": "agent", "user": { "token": self.token_on_node(account, node) } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "agent" } }],
            "current-context": "test",
        });
        // YAML includes JSON.
        std::fs::write(path, config.to_string()).expect("the folder is writable");
    }

    fn token_on_node(&self, account: PodAccount<'_>, node: &str) -> String {
        let pod = format!("{}-{node}", account.name);
        self.block_on(async {
            let admin = self.admin();
            create_account(&admin, account).await;
            apply_in_cluster::<Node>(&admin, node, json!({})).await;
            let spec = json!({
                "serviceAccountName": account.name,
                "nodeName": node,
                "containers": [{ "name": "agent", "image": "none" }],
            });
            let pod: Pod = apply_in(&admin, account.namespace, &pod, json!({ "spec": spec })).await;
            let bound = BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: pod.metadata.name.clone(),
                uid: pod.uid(),
            };
            token(&admin, account, Some(bound), None).await
        })
    }

    /// Returns a client of the account with a token that is bound to no pod and names no node. Creates
    /// namespace and account if missing.
    ///
    /// # Panics
    /// If the server refuses a request.
    pub fn client_on_no_node(&self, account: PodAccount<'_>) -> Client {
        let token = self.block_on(async {
            let admin = self.admin();
            create_account(&admin, account).await;
            token(&admin, account, None, None).await
        });
        self.client_with_token(token)
    }

    /// Returns a token of the account for an audience; `None`: the server. Creates namespace and account if
    /// missing.
    ///
    /// # Panics
    /// If the server refuses a request.
    pub fn token_for(&self, account: PodAccount<'_>, audience: Option<&str>) -> String {
        self.block_on(async {
            let admin = self.admin();
            create_account(&admin, account).await;
            token(&admin, account, None, audience).await
        })
    }
}

async fn create_account(admin: &Client, account: PodAccount<'_>) {
    apply_in_cluster::<Namespace>(admin, account.namespace, json!({})).await;
    apply_in::<ServiceAccount>(admin, account.namespace, account.name, json!({})).await;
}

async fn token(
    admin: &Client,
    account: PodAccount<'_>,
    bound: Option<BoundObjectReference>,
    audience: Option<&str>,
) -> String {
    let spec = TokenRequestSpec {
        audiences: audience.map(|audience| vec![audience.to_owned()]),
        bound_object_ref: bound,
        expiration_seconds: Some(TOKEN_SECONDS),
    };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), account.namespace);
    let response = accounts.create_token_request(account.name, &PostParams::default(), &request).await;
    let issued = response.expect("the server issues tokens").status;
    issued.and_then(|status| status.token).expect("a response of 2xx has a token")
}

async fn apply_in_cluster<K>(admin: &Client, name: &str, object: Value) -> K
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    apply(&Api::all(admin.clone()), name, object).await
}

async fn apply_in<K>(admin: &Client, namespace: &str, name: &str, object: Value) -> K
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    apply(&Api::namespaced(admin.clone(), namespace), name, object).await
}

/// Applies an object; an existing object stays as it is.
async fn apply<K>(api: &Api<K>, name: &str, mut object: Value) -> K
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    object["apiVersion"] = json!(K::api_version(&()));
    object["kind"] = json!(K::kind(&()));
    object["metadata"] = json!({ "name": name });
    let applied = api.patch(name, &PatchParams::apply(MANAGER), &Patch::Apply(&object)).await;
    applied.unwrap_or_else(|error| panic!("cannot apply {object}: {error}"))
}
