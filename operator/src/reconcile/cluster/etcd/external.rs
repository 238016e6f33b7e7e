//! Checks with the configured Secrets whether an external etcd responds.
//!
//! Neither such an etcd nor its Secrets send events. Both are checked again after [`HEALTHY_TTL`], or
//! [`FAILED_TTL`] after a failure; until then every reconcile uses the cached result.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{
    Certificate, Client, ConnectOptions, Error as EtcdError, GetOptions, Identity, TlsOptions,
};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, ExternalEtcd};
use reprise_crds::status::{ConditionType, Finding, Reason};
use tokio::time::Instant;
use tonic::transport::Endpoint;

use crate::framework::digest;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;

/// Lifetime of a successful check.
const HEALTHY_TTL: Duration = Duration::from_secs(25);
/// Lifetime of a failed check.
const FAILED_TTL: Duration = Duration::from_secs(4);
/// Age after which the cached check of a deleted cluster is dropped; existing clusters are checked at least
/// once a minute.
const EVICT_AFTER: Duration = Duration::from_secs(600);
/// Timeout for the connection and for the read, which normally take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdCheck {
    /// Digest of the Secrets' contents, or why they are unusable.
    pub secrets: Result<String, Refusal>,
    /// Whether etcd responded; the error otherwise.
    pub answer: Result<(), String>,
}

impl EtcdCheck {
    /// Whether the check succeeded.
    pub fn is_good(&self) -> bool {
        self.secrets.is_ok() && self.answer.is_ok()
    }

    /// Returns whether etcd is ready.
    pub(super) fn finding(&self, cluster: &KVCacheCluster) -> Finding {
        let kind = ConditionType::EtcdReady;
        match (&self.secrets, &self.answer) {
            (Err(refused), _) => Finding::no(kind, refused.reason, &refused.message),
            (_, Ok(())) => Finding::yes(kind, Reason::AsDesired, "etcd responds"),
            (_, Err(error)) => {
                let endpoints = cluster.spec.etcd.external.as_ref().map(|external| {
                    external.endpoints.iter().map(|endpoint| endpoint.as_str()).collect::<Vec<_>>().join(", ")
                });
                let message = format!(
                    "cannot use etcd at {}: {error}. Check endpoints, network policies, certificates and user",
                    endpoints.unwrap_or_default()
                );
                Finding::no(kind, Reason::EtcdUnreachable, message)
            }
        }
    }
}

/// A cached check, valid for one generation of the cluster.
#[derive(Debug)]
struct CachedCheck {
    generation: Option<i64>,
    at: Instant,
    check: EtcdCheck,
}

/// Last check of each cluster's external etcd, by the cluster's uid. A cluster has one reconcile at a time.
#[derive(Debug, Default)]
pub struct EtcdChecks {
    last: Mutex<HashMap<String, CachedCheck>>,
}

/// Contents of the Secrets.
struct Secrets {
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    password: Option<String>,
}

impl EtcdChecks {
    /// Returns the check of a cluster's external etcd, from the cache if it is still valid. Returns `None` if
    /// the operator manages etcd.
    pub async fn check(&self, cluster: &KVCacheCluster, context: &Context) -> Option<EtcdCheck> {
        let external = cluster.spec.etcd.external.as_ref();
        let external = external.filter(|_| cluster.spec.etcd.mode == EtcdMode::External)?;
        let names = ClusterNames::of(cluster);
        let generation = cluster.metadata.generation;
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = |cached: &&CachedCheck| {
            let stays = if cached.check.is_good() { HEALTHY_TTL } else { FAILED_TTL };
            cached.generation == generation && cached.at.elapsed() < stays
        };
        let fresh = last().get(&names.uid).filter(is_fresh).map(|cached| cached.check.clone());
        if fresh.is_some() {
            return fresh;
        }
        let check = probe_store(external, cluster.spec.etcd.key_prefix.as_str(), &names, context).await;
        let cached = CachedCheck { generation, at: Instant::now(), check: check.clone() };
        let mut last = last();
        last.retain(|_, cached| cached.at.elapsed() < EVICT_AFTER);
        last.insert(names.uid, cached);
        Some(check)
    }
}

async fn probe_store(
    external: &ExternalEtcd,
    prefix: &str,
    names: &ClusterNames,
    context: &Context,
) -> EtcdCheck {
    let secrets = match read_secrets(external, names, context).await {
        Ok(secrets) => secrets,
        Err(refused) => {
            let answer = Err(format!("not checked: {}", refused.message));
            return EtcdCheck { answer, secrets: Err(refused) };
        }
    };
    let answer = match tokio::time::timeout(TIMEOUT, read_one_key(external, prefix, &secrets)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if is_denial(&error) => Err(describe_denial(external, &error)),
        failed => {
            let timeout = format!("no response within {TIMEOUT:?}");
            let error = failed.ok().and_then(Result::err).map_or(timeout, |error| describe(&error));
            Err(tls_error(external, &secrets).await.unwrap_or(error))
        }
    };
    EtcdCheck { secrets: Ok(secrets.digest()), answer }
}

/// Reads the contents of the referenced Secrets.
async fn read_secrets(
    external: &ExternalEtcd,
    names: &ClusterNames,
    context: &Context,
) -> Result<Secrets, Refusal> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let invalid = |message: String| Refusal::new(Reason::SecretInvalid, message);
    let entry = async |secret: &str, key: &str, what: &str| {
        let found = api.get_opt(secret).await;
        let found =
            found.map_err(|error| invalid(format!("cannot read Secret {secret} ({what}): {error}")))?;
        let Some(found) = found else {
            let namespace = &names.namespace;
            let message =
                format!("Secret {secret} ({what}) does not exist in namespace {namespace}: create it");
            return Err(Refusal::new(Reason::ReferenceNotFound, message));
        };
        let value = found.data.unwrap_or_default().remove(key).map(|bytes| bytes.0);
        value
            .filter(|bytes| !bytes.is_empty())
            .ok_or_else(|| invalid(format!("Secret {secret} has no entry {key} ({what}): add it")))
    };
    let pem = async |secret: &str, key: &str, what: &str| {
        let bytes = entry(secret, key, what).await?;
        if bytes.windows(10).any(|window| window == b"-----BEGIN") {
            return Ok(bytes);
        }
        Err(invalid(format!("invalid entry {key} of Secret {secret} ({what}): expected PEM (-----BEGIN …)")))
    };
    let mut secrets = Secrets { ca: None, identity: None, password: None };
    if let Some(tls) = &external.tls {
        let authority = &tls.ca_secret_ref;
        secrets.ca =
            Some(pem(authority.name.as_str(), authority.key.as_str(), "CA certificates of etcd").await?);
        if let Some(client) = &tls.client_secret_ref {
            let name = client.name.as_str();
            let what = "client certificate for etcd";
            secrets.identity = Some((pem(name, "tls.crt", what).await?, pem(name, "tls.key", what).await?));
        }
    }
    if let Some(user) = &external.user {
        let reference = &user.password_secret_ref;
        let bytes = entry(reference.name.as_str(), reference.key.as_str(), "password for etcd").await?;
        let text = String::from_utf8(bytes).map_err(|_| {
            invalid(format!(
                "invalid entry {} of Secret {}: expected UTF-8 text",
                reference.key, reference.name
            ))
        })?;
        secrets.password = Some(text.trim_end_matches(['\r', '\n']).to_owned());
    }
    Ok(secrets)
}

/// Returns TLS options with the CA, and with the client certificate if there is one.
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

/// Reads one key, as members do when they start.
async fn read_one_key(external: &ExternalEtcd, prefix: &str, secrets: &Secrets) -> Result<(), EtcdError> {
    let mut options = ConnectOptions::new().with_connect_timeout(TIMEOUT).with_timeout(TIMEOUT);
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

/// Whether etcd rejected the user.
fn is_denial(error: &EtcdError) -> bool {
    let EtcdError::GRpcStatus(status) = error else { return false };
    let text = status.message();
    let is_of_users = ["authentication", "user name is empty", "permission denied", "invalid auth token"];
    is_of_users.iter().any(|phrase| text.contains(phrase))
}

fn describe_denial(external: &ExternalEtcd, error: &EtcdError) -> String {
    let user = external.user.as_ref();
    let user = user.map_or_else(
        || "requests without a user (set etcd.external.user)".to_owned(),
        |user| format!("user {} with the password in Secret {}", user.name, user.password_secret_ref.name),
    );
    format!("etcd rejects {user}: {}", describe(error))
}

/// Returns why a TLS connection fails. etcd's client retries without reporting the error, so this connects
/// directly.
async fn tls_error(external: &ExternalEtcd, secrets: &Secrets) -> Option<String> {
    let wanted = tls_options(external, secrets)?;
    let first = external.endpoints.first()?;
    let endpoint = Endpoint::from_shared(first.as_str().to_owned()).ok()?.tls_config(wanted).ok()?;
    let tried = tokio::time::timeout(TIMEOUT, endpoint.connect()).await.ok()?;
    let error = tried.err()?;
    Some(format!("cannot establish a TLS connection: {}", error_chain(&error)))
}

fn describe(error: &EtcdError) -> String {
    match error {
        EtcdError::GRpcStatus(status) => {
            let source = status.source().map(|source| format!(": {}", error_chain(source)));
            format!("{}{}", status.message(), source.unwrap_or_default())
        }
        EtcdError::TransportError(error) => error_chain(error),
        other => other.to_string(),
    }
}

/// Joins the messages of an error and its sources, without repetitions.
fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text_of_all = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !text_of_all.contains(&text) {
            text_of_all = format!("{text_of_all}: {text}");
        }
        source = error.source();
    }
    text_of_all
}

impl Secrets {
    /// Digest of the contents, which does not reveal them.
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
