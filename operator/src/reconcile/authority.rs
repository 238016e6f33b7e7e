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

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

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
use serde_json::{Value, json};

use crate::framework::child::ChildKind;
use crate::framework::children::api;
use crate::framework::clock;
use crate::framework::digest;
use crate::framework::error::{FORBIDDEN, OperatorError};
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

/// Entries of the Secret of an authority.
pub(crate) const CERTIFICATE: &str = "tls.crt";
pub(crate) const KEY: &str = "tls.key";
const PREVIOUS: &str = "previous.crt";

/// Authority of a cluster, as stored in its Secret.
#[derive(Debug)]
pub struct ClusterAuthority {
    authority: Authority,
    /// Certificate of the authority before, in PEM; empty for the first one.
    previous: String,
    created: Time,
}

/// State of the authority of a cluster.
#[derive(Clone, Debug)]
pub enum AuthorityState {
    Absent,
    Present(Arc<ClusterAuthority>),
    Unusable(Refusal),
}

/// The operator's certificates for connections to clusters, by the cluster's uid.
#[derive(Debug, Default)]
pub struct Certificates(Mutex<HashMap<String, (Tls, Files)>>);

/// Returns an entry of a Secret; empty if it is absent.
fn entry(secret: &Secret, name: &str) -> Result<String, String> {
    let bytes = secret.data.as_ref().and_then(|data| data.get(name)).map(|bytes| bytes.0.clone());
    String::from_utf8(bytes.unwrap_or_default()).map_err(|_| format!("entry {name} is not text"))
}

/// Reads an authority from its Secret.
pub(crate) fn load(secret: &Secret) -> Result<Authority, String> {
    Authority::load(&entry(secret, CERTIFICATE)?, &entry(secret, KEY)?).map_err(|error| error.to_string())
}

/// Wraps an error of creating certificates.
pub(crate) fn failed(error: impl std::fmt::Display) -> OperatorError {
    OperatorError::Identity(error.to_string())
}

impl ClusterAuthority {
    /// Reads the authority from its Secret.
    fn of(secret: &Secret) -> Result<ClusterAuthority, String> {
        Ok(ClusterAuthority {
            authority: load(secret)?,
            previous: entry(secret, PREVIOUS)?,
            created: secret.metadata.creation_timestamp.clone().unwrap_or_else(clock::now),
        })
    }

    /// Returns the authority that issues.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Certificates of all trusted authorities, in PEM. The first one issues.
    pub fn trusted(&self) -> String {
        let previous = if clock::since(&self.created) < TRUST_PREVIOUS { self.previous.as_str() } else { "" };
        format!("{}{previous}", self.authority.certificate())
    }

    /// Returns the number of days until the authority ends, if it has to be replaced.
    pub fn days_left(&self) -> Option<u64> {
        let left = self.authority.facts().remaining(clock::system_time());
        (left < REPLACE_AUTHORITY_WITHIN).then_some(left.as_secs() / 86_400)
    }

    /// Returns files with a certificate of an identity. The present certificate is kept unless it is unusable, its renewal is
    /// due at `now`, or all pods trust another authority that issues now.
    fn files(
        &self,
        present: Option<&Files>,
        identity: &Identity,
        now: SystemTime,
    ) -> Result<Files, OperatorError> {
        let trusted = self.trusted();
        let of = |files: &Files, authorities: &str| {
            let files = Files { authorities: authorities.as_bytes().to_vec(), ..files.clone() };
            let credentials = Credentials::parse(&files).ok()?;
            credentials.check_issuer().ok()?;
            (credentials.identity == *identity && !credentials.is_renewal_due(now)).then_some(files)
        };
        // Pods need time to trust another authority.
        let is_new = clock::since(&self.created) < SPREADS_WITHIN;
        let is_current = |files: &Files| is_new || of(files, self.authority.certificate()).is_some();
        let kept = present.and_then(|files| of(files, &trusted)).filter(is_current);
        match kept {
            Some(files) => Ok(files),
            None => {
                let issued = self.authority.issue(identity, CERTIFICATE_VALID).map_err(failed)?;
                Ok(issued.into_files(&trusted))
            }
        }
    }
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

impl Certificates {
    /// Returns the certificate for connections to a cluster. An earlier one is replaced if that is due.
    fn renew(&self, names: &ClusterNames, authority: &ClusterAuthority) -> Result<Tls, OperatorError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let present = all.get(&names.uid);
        let identity = Identity::new(&names.in_certificates(), Role::Operator).map_err(failed)?;
        let files = authority.files(present.map(|(_, files)| files), &identity, clock::system_time())?;
        let tls = match present {
            Some((tls, present)) if *present == files => return Ok(tls.clone()),
            Some((tls, _)) => {
                tls.replace(Credentials::parse(&files).map_err(failed)?);
                tls.clone()
            }
            None => Tls::new(Credentials::parse(&files).map_err(failed)?),
        };
        all.insert(names.uid.clone(), (tls.clone(), files));
        Ok(tls)
    }
}

/// Returns the state of a cluster's authority, as its watch reported it.
pub async fn read(cluster: &KVCacheCluster, context: &Context) -> AuthorityState {
    let names = ClusterNames::of(cluster);
    let name = names.authority();
    match context.secrets.get(&names, &name) {
        Some(stored) => of_secret(&names, context, &stored),
        None if context.secrets.is_absent(&names, &name) => AuthorityState::Absent,
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
    let secret = stored.clone().try_parse::<Secret>().map_err(|error| error.to_string());
    match secret.and_then(|secret| ClusterAuthority::of(&secret)) {
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
    match context.certificates.renew(names, &authority) {
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
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let data = json!({
        CERTIFICATE: bytes(authority.certificate()),
        KEY: bytes(authority.key()),
        PREVIOUS: bytes(&first_certificate(&trusted)),
    });
    let name = names.authority();
    let mut secret = secret(cluster, &names, &name, &data);
    secret["immutable"] = json!(true);
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

/// Builds a Secret of a cluster.
fn secret(cluster: &KVCacheCluster, names: &ClusterNames, name: &str, data: &Value) -> Value {
    let mut metadata = metadata(cluster, names, Component::ControlPlane, name);
    metadata["annotations"] = json!({ APPLIED: digest::of(&data.to_string()) });
    json!({ "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data })
}

/// Returns the first certificate of a text in PEM: that of the authority that issues.
pub(crate) fn first_certificate(trusted: &str) -> String {
    const END: &str = "-----END CERTIFICATE-----";
    let first = trusted.split_inclusive(END).next().unwrap_or_default().trim();
    if first.ends_with(END) { format!("{first}\n") } else { String::new() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    fn read(authority: &Authority, previous: &str, age: Duration) -> Arc<ClusterAuthority> {
        let authority = Authority::load(authority.certificate(), authority.key()).expect("valid PEM");
        let created = Time(clock::now().0 - age);
        Arc::new(ClusterAuthority { authority, previous: previous.to_owned(), created })
    }

    /// The authority of tests that need any one; always the same.
    pub(crate) fn any_authority() -> Arc<ClusterAuthority> {
        static ANY: std::sync::LazyLock<Arc<ClusterAuthority>> =
            std::sync::LazyLock::new(|| read(&Authority::create("c.n").expect("valid"), "", Duration::ZERO));
        Arc::clone(&ANY)
    }

    fn two() -> [Authority; 2] {
        ["c.n", "c.n"].map(|name| Authority::create(name).expect("valid"))
    }

    #[test]
    fn certificate_is_kept_until_it_is_due_or_another_authority_is_trusted_everywhere() {
        let ([first, second], now) = (two(), clock::system_time());
        let identity = Identity::new("c.n", Role::Console).expect("valid");
        let decide = |present: Option<&Files>, authority: &ClusterAuthority, now| {
            authority.files(present, &identity, now).expect("issued")
        };
        let only_first = read(&first, "", Duration::ZERO);
        let files = decide(None, &only_first, now);
        assert_eq!(Credentials::parse(&files).expect("valid").identity, identity);
        assert_eq!(decide(Some(&files), &only_first, now), files);
        assert_ne!(decide(Some(&files), &only_first, now + 61 * DAY), files, "its renewal is due");
        let other = Identity::new("c.n", Role::Operator).expect("valid");
        assert_ne!(only_first.files(Some(&files), &other, now).expect("issued"), files, "another identity");
        let untrusted = decide(Some(&files), &read(&second, "", Duration::ZERO), now);
        assert_ne!(untrusted.certificate, files.certificate, "no trusted authority has issued it");
        let both = decide(Some(&files), &read(&second, first.certificate(), Duration::ZERO), now);
        assert_eq!(both.certificate, files.certificate, "pods do not trust the new authority yet");
        assert_ne!(both.authorities, files.authorities, "both are trusted");
        let spread = read(&second, first.certificate(), SPREADS_WITHIN);
        let renewed = decide(Some(&both), &spread, now);
        assert_ne!(renewed.certificate, files.certificate);
        assert_eq!(decide(Some(&renewed), &spread, now), renewed);
    }

    #[test]
    fn connections_of_the_operator_use_a_new_authority_once_all_pods_trust_it() {
        let [first, second] = two();
        let certificates = Certificates::default();
        let own = certificates.renew(&names(), &read(&first, "", Duration::ZERO)).expect("valid");
        assert_eq!(own.credentials().identity.to_string(), "reprise://c.n/operator");
        let before = own.credentials().fingerprint;
        for (age, is_kept, trusted) in
            [(Duration::ZERO, true, 2), (SPREADS_WITHIN, false, 2), (TRUST_PREVIOUS, false, 1)]
        {
            certificates.renew(&names(), &read(&second, first.certificate(), age)).expect("valid");
            let now = own.credentials();
            assert_eq!((now.fingerprint == before, now.authorities.len()), (is_kept, trusted), "{age:?}");
            now.check_issuer().expect("a trusted authority has issued it");
        }
    }
}
