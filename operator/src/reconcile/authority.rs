//! Authorities of clusters: each issues the certificates of one cluster's agents, members and operators.
//!
//! | object | content | read by |
//! |---|---|---|
//! | Secret `<cluster>-ca` | certificate and key of the authority | the operator |
//! | Secret `<cluster>-console` | a certificate with its key ([`console`]) | scrapers and dashboards |
//! | ConfigMap `<cluster>-authorities` | certificates of trusted authorities | agents and members |
//!
//! The Secret is immutable. To replace an authority, an administrator deletes the Secret; the operator then creates
//! another authority. The new Secret also has the certificate of the authority before, taken from the ConfigMap. All
//! processes trust it for [`TRUST_PREVIOUS`], so running certificates stay valid until pods have new ones
//! ([`crate::signing::certificate`]).
//!
//! Invariant: if two operators create an authority at the same time, the API server rejects one of them, which then
//! uses the other's.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, PostParams};
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::credentials::{AUTHORITIES_FILE, Files};
use reprise_identity::follow::REPLACE_AUTHORITY_WITHIN;
use reprise_identity::{Authority, Credentials, Identity, Role, Security, Tls};
use serde_json::json;

use crate::framework::child::ChildKind;
use crate::framework::children::api;
use crate::framework::clock;
use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::reconcile::cluster::build::metadata::metadata;
use crate::reconcile::context::Context;
use crate::reconcile::names::{ClusterNames, Component};
use crate::reconcile::secrets;

pub(crate) mod console;

/// Time for which processes also trust the authority before. Pods have new certificates a few minutes after they trust
/// both; a day covers nodes that are away meanwhile.
const TRUST_PREVIOUS: Duration = Duration::from_secs(24 * 3_600);

/// Time from the creation of an authority until the operator uses a certificate of it: by then, all pods trust it.
const SPREADS_WITHIN: Duration = Duration::from_secs(180);

/// HTTP status code of requests that the operator has no permission for.
const FORBIDDEN: u16 = 403;

/// Entries of the Secret of the authority.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const PREVIOUS: &str = "previous.crt";

/// Authority of a cluster, as stored in its Secret.
#[derive(Debug)]
pub struct ClusterAuthority {
    authority: Authority,
    /// Unique id of the Secret, which is immutable.
    uid: Option<String>,
    /// Certificate of the authority before, in PEM; empty for the first one.
    previous: String,
    /// Time at which the Secret was created.
    created: Time,
}

/// State of the authority of a cluster.
#[derive(Clone, Debug)]
pub enum AuthorityState {
    /// The Secret does not exist yet.
    Absent,
    /// The authority can issue certificates.
    Present(Arc<ClusterAuthority>),
    /// The Secret cannot be used.
    Unusable(Refusal),
}

/// Authorities of all clusters, and the operator's certificates from them.
#[derive(Debug, Default)]
pub struct Authorities {
    /// By the cluster's uid.
    held: Mutex<HashMap<String, Held>>,
}

/// An authority, and the operator's certificate from it.
#[derive(Debug)]
struct Held {
    authority: Arc<ClusterAuthority>,
    own: Tls,
    files: Files,
    /// Certificate of the authority that has issued the operator's certificate.
    issuer: String,
}

impl ClusterAuthority {
    /// Reads the authority from its Secret.
    fn of(secret: &Secret) -> Result<ClusterAuthority, String> {
        let text = |entry: &str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(entry)).map(|bytes| bytes.0.clone());
            String::from_utf8(bytes.unwrap_or_default()).map_err(|_| format!("entry {entry} is not text"))
        };
        let authority =
            Authority::load(&text(CERTIFICATE)?, &text(KEY)?).map_err(|error| error.to_string())?;
        let created = secret.metadata.creation_timestamp.clone().unwrap_or_else(clock::now);
        let uid = secret.metadata.uid.clone();
        Ok(ClusterAuthority { authority, uid, previous: text(PREVIOUS)?, created })
    }

    /// Returns the authority that issues.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    fn age(&self) -> Duration {
        clock::since(&self.created)
    }

    /// Certificates of all trusted authorities, in PEM. The first one issues.
    pub fn trusted(&self) -> String {
        let previous = if self.age() < TRUST_PREVIOUS { self.previous.as_str() } else { "" };
        format!("{}{previous}", self.authority.certificate())
    }

    /// Returns the number of days until the authority ends, if it has to be replaced.
    pub fn days_left(&self) -> Option<u64> {
        let left = self.authority.facts().remaining(clock::system_time());
        (left < REPLACE_AUTHORITY_WITHIN).then_some(left.as_secs() / 86_400)
    }

    /// Issues files for the operator's connections to the cluster.
    fn issue_own(&self, names: &ClusterNames) -> Result<Files, OperatorError> {
        let identity = Identity::new(&names.in_certificates(), Role::Operator).map_err(failed)?;
        let issued = self.authority.issue(&identity, CERTIFICATE_VALID).map_err(failed)?;
        Ok(Files {
            authorities: self.trusted().into_bytes(),
            certificate: issued.certificate.into_bytes(),
            key: issued.key.into_bytes(),
        })
    }
}

/// Wraps an error of creating certificates.
fn failed(error: impl std::fmt::Display) -> OperatorError {
    OperatorError::Identity(error.to_string())
}

impl AuthorityState {
    /// Certificates of trusted authorities in PEM, if there are any.
    pub fn trusted(&self) -> Option<String> {
        match self {
            AuthorityState::Present(authority) => Some(authority.trusted()),
            _ => None,
        }
    }
}

impl Authorities {
    /// Returns the authority of a cluster if it was read from this Secret.
    fn held(&self, names: &ClusterNames, secret: &DynamicObject) -> Option<Arc<ClusterAuthority>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let found = &held.get(&names.uid)?.authority;
        (found.uid.is_some() && found.uid == secret.metadata.uid).then(|| Arc::clone(found))
    }

    /// Keeps an authority, and returns the operator's certificates for calls to the cluster.
    fn keep(&self, names: &ClusterNames, read: &Arc<ClusterAuthority>) -> Result<Tls, OperatorError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let trusted = read.trusted();
        if let Some(known) = held.get_mut(&names.uid) {
            known.authority = Arc::clone(read);
            let is_other = known.issuer != read.authority.certificate();
            let is_trusted = trusted.contains(&known.issuer);
            let is_due = known.own.credentials().is_renewal_due(clock::system_time());
            // Before, some pods do not trust the new authority yet, and all trust the one before.
            let files = if is_due || !is_trusted || (is_other && read.age() >= SPREADS_WITHIN) {
                known.issuer = read.authority.certificate().to_owned();
                read.issue_own(names)?
            } else {
                Files { authorities: trusted.into_bytes(), ..known.files.clone() }
            };
            if files != known.files {
                known.own.replace(Credentials::parse(&files).map_err(failed)?);
                known.files = files;
            }
            return Ok(known.own.clone());
        }
        let files = read.issue_own(names)?;
        let own = Tls::new(Credentials::parse(&files).map_err(failed)?);
        let issuer = read.authority.certificate().to_owned();
        let new = Held { authority: Arc::clone(read), own: own.clone(), files, issuer };
        held.insert(names.uid.clone(), new);
        Ok(own)
    }
}

/// Returns the state of a cluster's authority, as its watch reported it.
pub async fn read(cluster: &KVCacheCluster, context: &Context) -> AuthorityState {
    let names = ClusterNames::of(cluster);
    let name = names.authority();
    match context.secrets.get(&names.namespace, &name) {
        Some(stored) => of_secret(&names, context, &stored),
        None if context.secrets.is_absent(&names.namespace, &name) => AuthorityState::Absent,
        None => fetch(&names, context).await,
    }
}

/// Reads the authority of a cluster from the API server: the watch may lag.
async fn fetch(names: &ClusterNames, context: &Context) -> AuthorityState {
    let secrets = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    match secrets.get_opt(&names.authority()).await {
        Ok(Some(stored)) if stored.labels().get(CLUSTER_UID) == Some(&names.uid) => {
            of_secret(names, context, &stored)
        }
        Ok(Some(_)) => unusable(names, "it does not belong to this cluster"),
        Ok(None) => AuthorityState::Absent,
        Err(kube::Error::Api(status)) if status.code == FORBIDDEN => {
            AuthorityState::Unusable(secrets::refusal(names, &status.message))
        }
        Err(error) => unusable(names, &error.to_string()),
    }
}

fn of_secret(names: &ClusterNames, context: &Context, stored: &DynamicObject) -> AuthorityState {
    if let Some(held) = context.authorities.held(names, stored) {
        return present(names, context, held);
    }
    let secret = serde_json::to_value(stored).and_then(serde_json::from_value::<Secret>);
    match secret.map_err(|error| error.to_string()).and_then(|secret| ClusterAuthority::of(&secret)) {
        Ok(authority) => present(names, context, Arc::new(authority)),
        Err(error) => unusable(names, &error),
    }
}

fn unusable(names: &ClusterNames, error: &str) -> AuthorityState {
    let message = format!(
        "cannot use Secret {}, the authority of the cluster's certificates: {error}; restore it from a backup, or \
         delete it, and the operator creates another authority",
        names.authority()
    );
    AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, message))
}

fn present(names: &ClusterNames, context: &Context, authority: Arc<ClusterAuthority>) -> AuthorityState {
    match context.authorities.keep(names, &authority) {
        Ok(own) => {
            context.control_planes.set_security(names, Security::Tls(own));
            AuthorityState::Present(authority)
        }
        Err(error) => AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, error.message())),
    }
}

/// Creates the authority of a cluster that has none.
///
/// # Errors
/// The API server rejected the Secret, for example because another operator was faster.
pub async fn create(cluster: &KVCacheCluster, context: &Context) -> Result<AuthorityState, OperatorError> {
    let names = ClusterNames::of(cluster);
    match fetch(&names, context).await {
        AuthorityState::Absent => {}
        found => return Ok(found),
    }
    let authority = Authority::create(&names.in_certificates()).map_err(failed)?;
    let maps: Api<ConfigMap> = Api::namespaced(context.client.clone(), &names.namespace);
    let map =
        maps.get_opt(&names.authorities()).await.map_err(OperatorError::api("get trusted authorities"))?;
    let trusted = map.and_then(|map| map.data?.remove(AUTHORITIES_FILE)).unwrap_or_default();
    let mut data: BTreeMap<&str, ByteString> = BTreeMap::new();
    let mut add = |entry, text: &str| data.insert(entry, ByteString(text.as_bytes().to_vec()));
    add(CERTIFICATE, authority.certificate());
    add(KEY, authority.key());
    add(PREVIOUS, &first_certificate(&trusted));
    let name = names.authority();
    let mut metadata = metadata(cluster, &names, Component::ControlPlane, &name);
    metadata["annotations"] = json!({ APPLIED: digest::of(&json!(data).to_string()) });
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": true,
        "metadata": metadata, "data": data,
    });
    let secret: Secret = serde_json::from_value(secret).expect("made above");
    let params =
        PostParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PostParams::default() };
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let created = secrets.create(&params, &secret).await;
    let created = created.map_err(OperatorError::api(format!("create Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    tracing::info!(secret = name, "created an authority");
    let authority = ClusterAuthority::of(&created).map_err(failed)?;
    Ok(present(&names, context, Arc::new(authority)))
}

/// Returns the first certificate of a text in PEM: the authority that issued before.
fn first_certificate(trusted: &str) -> String {
    const END: &str = "-----END CERTIFICATE-----";
    let first = trusted.split_inclusive(END).next().unwrap_or_default().trim();
    if first.ends_with(END) { format!("{first}\n") } else { String::new() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    pub(super) fn read(authority: &Authority, previous: &str, age: Duration) -> Arc<ClusterAuthority> {
        let authority = Authority::load(authority.certificate(), authority.key()).expect("valid PEM");
        let created = Time(clock::now().0 - age);
        Arc::new(ClusterAuthority { authority, uid: None, previous: previous.to_owned(), created })
    }

    /// The authority of tests that need any one; always the same.
    pub(crate) fn any_authority() -> Arc<ClusterAuthority> {
        static ANY: std::sync::LazyLock<Arc<ClusterAuthority>> =
            std::sync::LazyLock::new(|| read(&Authority::create("c.n").expect("valid"), "", Duration::ZERO));
        Arc::clone(&ANY)
    }

    #[test]
    fn operator_uses_a_new_authority_once_all_pods_trust_it() {
        let (first, second) =
            (Authority::create("c.n").expect("valid"), Authority::create("c.n").expect("valid"));
        let authorities = Authorities::default();
        let own = authorities.keep(&names(), &read(&first, "", Duration::ZERO)).expect("valid");
        let in_use = || own.credentials().fingerprint;
        let before = in_use();
        authorities.keep(&names(), &read(&second, first.certificate(), Duration::ZERO)).expect("valid");
        assert_eq!((in_use(), own.credentials().authorities.len()), (before, 2), "it trusts both");
        authorities.keep(&names(), &read(&second, first.certificate(), SPREADS_WITHIN)).expect("valid");
        assert_ne!(in_use(), before);
        own.credentials().check_issuer().expect("a trusted authority has issued it");
        let after = in_use();
        authorities.keep(&names(), &read(&second, first.certificate(), TRUST_PREVIOUS)).expect("valid");
        assert_eq!((in_use(), own.credentials().authorities.len()), (after, 1), "it trusts the new one only");
        assert_eq!(own.credentials().identity.to_string(), "reprise://c.n/operator");
    }

    #[test]
    fn operator_replaces_its_certificate_at_once_if_no_trusted_authority_has_issued_it() {
        let (first, second) =
            (Authority::create("c.n").expect("valid"), Authority::create("c.n").expect("valid"));
        let authorities = Authorities::default();
        let own = authorities.keep(&names(), &read(&first, "", Duration::ZERO)).expect("valid");
        authorities.keep(&names(), &read(&second, "", Duration::ZERO)).expect("valid");
        own.credentials().check_issuer().expect("a trusted authority has issued it");
    }

    #[test]
    fn only_the_first_trusted_authority_becomes_the_previous_one() {
        let (one, two) = (Authority::create("a").expect("valid"), Authority::create("b").expect("valid"));
        let both = format!("{}{}", one.certificate(), two.certificate());
        assert_eq!(first_certificate(&both).trim(), one.certificate().trim());
        assert_eq!(first_certificate(""), "");
        assert_eq!(first_certificate("text"), "");
    }
}
