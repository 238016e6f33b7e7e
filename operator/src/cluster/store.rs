//! Asks an etcd of somebody else whether it answers, with the secrets that it was given.
//!
//! Nothing tells us when such an etcd or a Secret changes, so both are looked at again after [`STAYS_GOOD`], or [`STAYS_BAD`] when
//! something was wrong; in between the last look holds, whatever else makes a cluster reconcile.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use etcd_client::{Certificate, Client, ConnectOptions, GetOptions, Identity, TlsOptions};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, ExternalEtcd};
use reprise_crds::status::Reason;
use tokio::sync::Mutex;

use crate::context::Context;
use crate::digest;
use crate::names::ClusterNames;
use crate::plan::Refusal;

/// How long a look holds at which all was well.
const STAYS_GOOD: Duration = Duration::from_secs(25);
/// How long one holds at which something was not.
const STAYS_BAD: Duration = Duration::from_secs(4);
/// Connecting and one read of an etcd that is there take milliseconds.
const PATIENCE: Duration = Duration::from_secs(3);

/// What was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLook {
    /// Digest of the secrets, or what is wrong with them.
    pub secrets: Result<String, Refusal>,
    /// What etcd said.
    pub answer: Result<(), String>,
}

impl StoreLook {
    /// Whether nothing was wrong.
    pub fn is_good(&self) -> bool {
        self.secrets.is_ok() && self.answer.is_ok()
    }
}

/// A cluster's unique id and generation.
type LookedAt = (String, Option<i64>);

/// The last look at each cluster's store.
#[derive(Debug, Default)]
pub struct StoreLooks {
    last: Mutex<HashMap<LookedAt, (Instant, StoreLook)>>,
}

/// What the secrets hold.
struct Secrets {
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    password: Option<String>,
}

impl StoreLooks {
    /// Looks at a cluster's store, unless the last look still holds. None: the operator runs it.
    pub async fn look(&self, cluster: &KVCacheCluster, context: &Context) -> Option<StoreLook> {
        let external = cluster.spec.etcd.external.as_ref();
        let external = external.filter(|_| cluster.spec.etcd.mode == EtcdMode::External)?;
        let names = ClusterNames::of(cluster);
        let key = (names.uid.clone(), cluster.metadata.generation);
        let mut last = self.last.lock().await;
        if let Some((when, look)) = last.get(&key) {
            let stays = if look.is_good() { STAYS_GOOD } else { STAYS_BAD };
            if when.elapsed() < stays {
                return Some(look.clone());
            }
        }
        let look = look(external, cluster.spec.etcd.key_prefix.as_str(), &names, context).await;
        last.retain(|(uid, _), _| *uid != names.uid);
        last.insert(key, (Instant::now(), look.clone()));
        Some(look)
    }
}

async fn look(external: &ExternalEtcd, prefix: &str, names: &ClusterNames, context: &Context) -> StoreLook {
    match read(external, names, context).await {
        Err(refused) => {
            StoreLook { answer: Err(format!("not asked: {}", refused.message)), secrets: Err(refused) }
        }
        Ok(secrets) => {
            let asked = tokio::time::timeout(PATIENCE, ask(external, prefix, &secrets)).await;
            let answer = asked.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")));
            StoreLook { secrets: Ok(secrets.digest()), answer }
        }
    }
}

/// Reads the secrets.
async fn read(external: &ExternalEtcd, names: &ClusterNames, context: &Context) -> Result<Secrets, Refusal> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let entry = async |secret: &str, key: &str, what: &str| {
        let refuse = |reason, message: String| Err(Refusal::new(reason, message));
        match api.get_opt(secret).await {
            Err(error) => {
                refuse(Reason::SecretInvalid, format!("Secret {secret} ({what}) cannot be read: {error}"))
            }
            Ok(None) => {
                let namespace = &names.namespace;
                let message =
                    format!("Secret {secret} ({what}) is not in namespace {namespace}: make it there");
                refuse(Reason::ReferenceNotFound, message)
            }
            Ok(Some(found)) => {
                let value = found.data.unwrap_or_default().remove(key).map(|bytes| bytes.0);
                match value.filter(|bytes| !bytes.is_empty()) {
                    Some(bytes) => Ok(bytes),
                    None => {
                        let message = format!("Secret {secret} has no entry {key} ({what}): add it");
                        refuse(Reason::SecretInvalid, message)
                    }
                }
            }
        }
    };
    let pem = async |secret: &str, key: &str, what: &str| {
        let bytes = entry(secret, key, what).await?;
        if bytes.windows(10).any(|window| window == b"-----BEGIN") {
            return Ok(bytes);
        }
        let message = format!("entry {key} of Secret {secret} ({what}) is not PEM: write it as -----BEGIN …");
        Err(Refusal::new(Reason::SecretInvalid, message))
    };
    let mut secrets = Secrets { ca: None, identity: None, password: None };
    if let Some(tls) = &external.tls {
        let authority = &tls.ca_secret_ref;
        secrets.ca = Some(pem(authority.name.as_str(), authority.key.as_str(), "authorities of etcd").await?);
        if let Some(client) = &tls.client_secret_ref {
            let name = client.name.as_str();
            let what = "our certificate for etcd";
            secrets.identity = Some((pem(name, "tls.crt", what).await?, pem(name, "tls.key", what).await?));
        }
    }
    if let Some(user) = &external.user {
        let reference = &user.password_secret_ref;
        let bytes = entry(reference.name.as_str(), reference.key.as_str(), "password for etcd").await?;
        let text = String::from_utf8(bytes).map_err(|_| {
            let message = format!("entry {} of Secret {} is no text", reference.key, reference.name);
            Refusal::new(Reason::SecretInvalid, message)
        })?;
        secrets.password = Some(text.trim_end_matches(['\r', '\n']).to_owned());
    }
    Ok(secrets)
}

/// Reads one key, as a member does at its start.
async fn ask(external: &ExternalEtcd, prefix: &str, secrets: &Secrets) -> Result<(), String> {
    let mut options = ConnectOptions::new().with_connect_timeout(PATIENCE).with_timeout(PATIENCE);
    if let (Some(tls), Some(ca)) = (&external.tls, &secrets.ca) {
        let mut wanted = TlsOptions::new().ca_certificate(Certificate::from_pem(ca));
        if let Some((certificate, key)) = &secrets.identity {
            wanted = wanted.identity(Identity::from_pem(certificate, key));
        }
        if let Some(name) = &tls.server_name {
            wanted = wanted.domain_name(name.as_str());
        }
        options = options.with_tls(wanted);
    }
    if let (Some(user), Some(password)) = (&external.user, &secrets.password) {
        options = options.with_user(user.name.as_str(), password);
    }
    let endpoints: Vec<&str> = external.endpoints.iter().map(|endpoint| endpoint.as_str()).collect();
    let mut client = Client::connect(endpoints, Some(options)).await.map_err(|error| error.to_string())?;
    let first = GetOptions::new().with_prefix().with_keys_only().with_limit(1);
    client.get(prefix, Some(first)).await.map(|_| ()).map_err(|error| error.to_string())
}

impl Secrets {
    /// Tells one content from another, and nothing of it.
    fn digest(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let identity = self.identity.as_ref();
        let parts = [
            self.ca.as_deref().map(hex),
            identity.map(|(certificate, _)| hex(certificate)),
            identity.map(|(_, key)| hex(key)),
            self.password.clone(),
        ];
        digest::of(&format!("{parts:?}"))
    }
}
