//! Checks with the configured Secrets whether an external etcd responds.
//!
//! Neither such an etcd nor its Secrets send events. Both are checked again after [`HEALTHY_TTL`], or
//! [`FAILED_TTL`] after a failure; until then every reconcile uses the cached result.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{
    Certificate, Client, ConnectOptions, Error as EtcdError, GetOptions, Identity, TlsOptions,
};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::ExternalEtcd;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use tokio::time::{Instant, timeout};
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use crate::framework::digest;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;

/// Lifetime of a successful check.
const HEALTHY_TTL: Duration = Duration::from_secs(25);
/// Lifetime of a failed check.
const FAILED_TTL: Duration = Duration::from_secs(4);
/// Timeout for the connection and for the read, which normally take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Codes with which etcd rejects users.
const DENIALS: [Code; 4] =
    [Code::InvalidArgument, Code::PermissionDenied, Code::Unauthenticated, Code::FailedPrecondition];
/// File with the password of the etcd user in members' pods.
pub(crate) const PASSWORD_FILE: &str = "password";

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
                let external = cluster.spec.etcd.external.as_ref();
                let endpoints = external.map(|external| endpoints(external).join(", ")).unwrap_or_default();
                let message = format!(
                    "cannot use etcd at {endpoints}: {error}. Check endpoints, network policies, certificates and user"
                );
                Finding::no(kind, Reason::EtcdUnreachable, message)
            }
        }
    }
}

/// Checks and the ends of their validity, by uid and generation of the cluster.
type Checks = HashMap<(String, Option<i64>), (Instant, EtcdCheck)>;

/// Valid checks of all clusters.
#[derive(Debug, Default)]
pub struct EtcdChecks(Mutex<Checks>);

impl EtcdChecks {
    /// Returns the check of a cluster's external etcd, from the cache if it is still valid. Returns `None` if
    /// the operator manages etcd.
    pub async fn check(&self, cluster: &KVCacheCluster, context: &Context) -> Option<EtcdCheck> {
        let external = cluster.spec.etcd.external.as_ref()?;
        let names = ClusterNames::of(cluster);
        let key = (names.uid.clone(), cluster.metadata.generation);
        if let Some((_, check)) = self.valid().get(&key) {
            return Some(check.clone());
        }
        let check = check(external, cluster.spec.etcd.key_prefix.as_str(), &names, context).await;
        let ttl = if check.is_good() { HEALTHY_TTL } else { FAILED_TTL };
        self.valid().insert(key, (Instant::now() + ttl, check.clone()));
        Some(check)
    }

    fn valid(&self) -> MutexGuard<'_, Checks> {
        let mut checks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        checks.retain(|_, (until, _)| Instant::now() < *until);
        checks
    }
}

/// An entry of a Secret for the connection.
pub(crate) struct SecretEntry<'a> {
    pub(crate) secret: &'a str,
    pub(crate) key: &'a str,
    /// Name of the file in which members read it.
    pub(crate) file: &'static str,
    /// Its content, for messages.
    content: &'static str,
}

/// Returns the entries of Secrets that an external etcd needs.
pub(crate) fn secret_entries(external: &ExternalEtcd) -> Vec<SecretEntry<'_>> {
    let mut entries = Vec::new();
    if let Some(tls) = &external.tls {
        let (secret, key) = (tls.ca_secret_ref.name.as_str(), tls.ca_secret_ref.key.as_str());
        entries.push(SecretEntry { secret, key, file: AUTHORITIES_FILE, content: "CA certificates of etcd" });
        if let Some(client) = &tls.client_secret_ref {
            let (secret, content) = (client.name.as_str(), "client certificate for etcd");
            let entry = |file| SecretEntry { secret, key: file, file, content };
            entries.extend([CERTIFICATE_FILE, KEY_FILE].map(entry));
        }
    }
    if let Some(user) = &external.user {
        let (secret, key) = (user.password_secret_ref.name.as_str(), user.password_secret_ref.key.as_str());
        entries.push(SecretEntry { secret, key, file: PASSWORD_FILE, content: "password for etcd" });
    }
    entries
}

/// Contents of the entries by file.
type Secrets = BTreeMap<&'static str, Vec<u8>>;

async fn check(external: &ExternalEtcd, prefix: &str, names: &ClusterNames, context: &Context) -> EtcdCheck {
    let secrets = match read_secrets(external, names, context).await {
        Ok(secrets) => secrets,
        Err(refused) => return EtcdCheck { secrets: Err(refused), answer: Err("not checked".to_owned()) },
    };
    let answer = match timeout(TIMEOUT, read_one_key(external, prefix, &secrets)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(EtcdError::GRpcStatus(status))) if DENIALS.contains(&status.code()) => {
            Err(describe_denial(external, &status))
        }
        Ok(Err(error)) => Err(tls_error(external, &secrets).await.unwrap_or_else(|| describe(&error))),
        Err(_) => {
            let error = tls_error(external, &secrets).await;
            Err(error.unwrap_or_else(|| format!("no response within {TIMEOUT:?}")))
        }
    };
    EtcdCheck { secrets: Ok(digest::of(&format!("{secrets:?}"))), answer }
}

/// Reads the contents of the referenced Secrets.
async fn read_secrets(
    external: &ExternalEtcd,
    names: &ClusterNames,
    context: &Context,
) -> Result<Secrets, Refusal> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let invalid = |message: String| Refusal::new(Reason::SecretInvalid, message);
    let mut secrets = Secrets::new();
    for SecretEntry { secret, key, file, content } in secret_entries(external) {
        let found = api.get_opt(secret).await;
        let found =
            found.map_err(|error| invalid(format!("cannot read Secret {secret} ({content}): {error}")))?;
        let Some(found) = found else {
            let namespace = &names.namespace;
            let message =
                format!("Secret {secret} ({content}) does not exist in namespace {namespace}: create it");
            return Err(Refusal::new(Reason::ReferenceNotFound, message));
        };
        let bytes = found.data.unwrap_or_default().remove(key).map(|bytes| bytes.0).unwrap_or_default();
        if bytes.is_empty() {
            return Err(invalid(format!("Secret {secret} has no entry {key} ({content}): add it")));
        }
        if file != PASSWORD_FILE && !bytes.windows(10).any(|window| window == b"-----BEGIN") {
            let message =
                format!("invalid entry {key} of Secret {secret} ({content}): expected PEM (-----BEGIN …)");
            return Err(invalid(message));
        }
        secrets.insert(file, bytes);
    }
    Ok(secrets)
}

/// Returns TLS options with the CA, and with the client certificate if there is one.
fn tls_options(external: &ExternalEtcd, secrets: &Secrets) -> Option<TlsOptions> {
    let tls = external.tls.as_ref()?;
    let mut options = TlsOptions::new().ca_certificate(Certificate::from_pem(secrets.get(AUTHORITIES_FILE)?));
    if let (Some(certificate), Some(key)) = (secrets.get(CERTIFICATE_FILE), secrets.get(KEY_FILE)) {
        options = options.identity(Identity::from_pem(certificate, key));
    }
    if let Some(name) = &tls.server_name {
        options = options.domain_name(name.as_str());
    }
    Some(options)
}

/// Reads one key, as members do when they start.
async fn read_one_key(external: &ExternalEtcd, prefix: &str, secrets: &Secrets) -> Result<(), EtcdError> {
    let mut options = ConnectOptions::new().with_connect_timeout(TIMEOUT).with_timeout(TIMEOUT);
    if let Some(tls) = tls_options(external, secrets) {
        options = options.with_tls(tls);
    }
    if let (Some(user), Some(password)) = (&external.user, secrets.get(PASSWORD_FILE)) {
        let password = String::from_utf8_lossy(password);
        options = options.with_user(user.name.as_str(), password.trim_end_matches(['\r', '\n']));
    }
    let mut client = Client::connect(endpoints(external), Some(options)).await?;
    let first = GetOptions::new().with_prefix().with_keys_only().with_limit(1);
    client.get(prefix, Some(first)).await.map(|_| ())
}

fn endpoints(external: &ExternalEtcd) -> Vec<&str> {
    external.endpoints.iter().map(|endpoint| endpoint.as_str()).collect()
}

fn describe_denial(external: &ExternalEtcd, status: &Status) -> String {
    let user = external.user.as_ref().map_or_else(
        || "requests without a user (set etcd.external.user)".to_owned(),
        |user| format!("user {} with the password in Secret {}", user.name, user.password_secret_ref.name),
    );
    format!("etcd rejects {user}: {}", status.message())
}

/// Returns why a TLS connection fails. etcd's client retries without reporting the error, so this connects
/// directly.
async fn tls_error(external: &ExternalEtcd, secrets: &Secrets) -> Option<String> {
    let options = tls_options(external, secrets)?;
    let first = external.endpoints.first()?;
    let endpoint = Endpoint::from_shared(first.as_str().to_owned()).ok()?.tls_config(options).ok()?;
    let error = timeout(TIMEOUT, endpoint.connect()).await.ok()?.err()?;
    Some(format!("cannot establish a TLS connection: {}", cause(&error)))
}

fn describe(error: &EtcdError) -> String {
    match error {
        EtcdError::GRpcStatus(status) => status.source().map_or_else(|| status.message().to_owned(), cause),
        EtcdError::TransportError(error) => cause(error),
        other => other.to_string(),
    }
}

/// Returns the innermost cause of an error; the transport's own messages are generic.
fn cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
