//! Asks an etcd of somebody else whether it answers, with the secrets that it was given.
//!
//! Nothing tells us when such an etcd or a Secret changes, so both are looked at again after [`STAYS_GOOD`], or [`STAYS_BAD`] when
//! something was wrong; in between the last look holds, whatever else makes a cluster reconcile.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use etcd_client::{
    Certificate, Client, ConnectOptions, Error as EtcdError, GetOptions, Identity, TlsOptions,
};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, ExternalEtcd};
use reprise_crds::status::Reason;
use tokio::sync::Mutex;
use tonic::transport::Endpoint;

use crate::context::Context;
use crate::digest;
use crate::names::ClusterNames;
use crate::plan::Refusal;

/// How long a look holds at which all was well.
const STAYS_GOOD: Duration = Duration::from_secs(25);
/// How long one holds at which something was not.
const STAYS_BAD: Duration = Duration::from_secs(4);
/// A cluster that is there is looked at within a minute.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
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

/// A look at the store of a cluster of this generation.
#[derive(Debug)]
struct Looked {
    generation: Option<i64>,
    when: Instant,
    look: StoreLook,
}

/// The last look at each cluster's store, by the cluster's unique id. An etcd that does not answer keeps nobody waiting but its own cluster.
#[derive(Debug, Default)]
pub struct StoreLooks {
    last: SyncMutex<HashMap<String, Arc<Mutex<Option<Looked>>>>>,
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
        let generation = cluster.metadata.generation;
        let own = self.of(&names.uid);
        let mut last = own.lock().await;
        if let Some(looked) = last.as_ref().filter(|looked| looked.generation == generation) {
            let stays = if looked.look.is_good() { STAYS_GOOD } else { STAYS_BAD };
            if looked.when.elapsed() < stays {
                return Some(looked.look.clone());
            }
        }
        let look = look(external, cluster.spec.etcd.key_prefix.as_str(), &names, context).await;
        *last = Some(Looked { generation, when: Instant::now(), look: look.clone() });
        Some(look)
    }

    fn of(&self, uid: &str) -> Arc<Mutex<Option<Looked>>> {
        let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains_key(uid) {
            // Of clusters that are gone.
            let is_old = |looked: &Looked| looked.when.elapsed() > FORGOTTEN_AFTER;
            all.retain(|_, own| own.try_lock().map_or(true, |last| !last.as_ref().is_some_and(is_old)));
        }
        Arc::clone(all.entry(uid.to_owned()).or_default())
    }
}

async fn look(external: &ExternalEtcd, prefix: &str, names: &ClusterNames, context: &Context) -> StoreLook {
    match read(external, names, context).await {
        Err(refused) => {
            StoreLook { answer: Err(format!("not asked: {}", refused.message)), secrets: Err(refused) }
        }
        Ok(secrets) => {
            let asked = tokio::time::timeout(PATIENCE, ask(external, prefix, &secrets)).await;
            let answer = match asked {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) if is_denial(&error) => Err(denied(external, &error)),
                failed => {
                    let late = format!("no answer within {PATIENCE:?}");
                    let said = failed
                        .map_or(late, |asked| asked.map_or_else(|error| words(&error), |()| String::new()));
                    Err(mistrust(external, &secrets).await.unwrap_or(said))
                }
            };
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

/// How to trust etcd, and to be trusted, where that is wanted.
fn tls_options(external: &ExternalEtcd, secrets: &Secrets) -> Option<TlsOptions> {
    let (tls, ca) = (external.tls.as_ref()?, secrets.ca.as_ref()?);
    let mut wanted = TlsOptions::new().ca_certificate(Certificate::from_pem(ca));
    if let Some((certificate, key)) = &secrets.identity {
        wanted = wanted.identity(Identity::from_pem(certificate, key));
    }
    if let Some(name) = &tls.server_name {
        wanted = wanted.domain_name(name.as_str());
    }
    Some(wanted)
}

/// Reads one key, as a member does at its start.
async fn ask(external: &ExternalEtcd, prefix: &str, secrets: &Secrets) -> Result<(), EtcdError> {
    let mut options = ConnectOptions::new().with_connect_timeout(PATIENCE).with_timeout(PATIENCE);
    if let Some(wanted) = tls_options(external, secrets) {
        options = options.with_tls(wanted);
    }
    if let (Some(user), Some(password)) = (&external.user, &secrets.password) {
        options = options.with_user(user.name.as_str(), password);
    }
    let endpoints: Vec<&str> = external.endpoints.iter().map(|endpoint| endpoint.as_str()).collect();
    let mut client = Client::connect(endpoints, Some(options)).await?;
    let first = GetOptions::new().with_prefix().with_keys_only().with_limit(1);
    client.get(prefix, Some(first)).await.map(|_| ())
}

/// Whether etcd answered that it will not have our user.
fn is_denial(error: &EtcdError) -> bool {
    let EtcdError::GRpcStatus(status) = error else { return false };
    let text = status.message();
    let is_of_users = ["authentication", "user name is empty", "permission denied", "invalid auth token"];
    is_of_users.iter().any(|words| text.contains(words))
}

fn denied(external: &ExternalEtcd, error: &EtcdError) -> String {
    let user = external.user.as_ref();
    let who = user.map_or_else(
        || "who names no user (etcd.external.user)".to_owned(),
        |user| format!("user {} with the password in Secret {}", user.name, user.password_secret_ref.name),
    );
    format!("it refuses {who}: {}", words(error))
}

/// Why no connection with TLS comes about: etcd's client tries again in silence, so one is made for its error.
async fn mistrust(external: &ExternalEtcd, secrets: &Secrets) -> Option<String> {
    let wanted = tls_options(external, secrets)?;
    let first = external.endpoints.first()?;
    let endpoint = Endpoint::from_shared(first.as_str().to_owned()).ok()?.tls_config(wanted).ok()?;
    let tried = tokio::time::timeout(PATIENCE, endpoint.connect()).await.ok()?;
    let error = tried.err()?;
    Some(format!("no connection with TLS comes about: {}", chain(&error)))
}

fn words(error: &EtcdError) -> String {
    match error {
        EtcdError::GRpcStatus(status) => {
            let source = status.source().map(|source| format!(": {}", chain(source))).unwrap_or_default();
            format!("{}{source}", status.message())
        }
        EtcdError::TransportError(error) => chain(error),
        other => other.to_string(),
    }
}

/// What an error and its sources say, each once.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut told = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !told.contains(&text) {
            told = format!("{told}: {text}");
        }
        source = error.source();
    }
    told
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
