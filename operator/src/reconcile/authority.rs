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

use anyhow::ensure;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use kube::api::{DynamicObject, PostParams};
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::certificate::split;
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

/// Time from the first sight of another authority until a certificate of it is used: by then, all pods trust it. The
/// kubelet updates mounted ConfigMaps within a minute or two.
const SPREADS_WITHIN: Duration = Duration::from_secs(180);

/// Entries of the Secret of an authority.
pub(crate) const CERTIFICATE: &str = "tls.crt";
pub(crate) const KEY: &str = "tls.key";
const PREVIOUS: &str = "previous.crt";

/// Authority of a cluster, as stored in its Secret.
#[derive(Debug)]
pub struct ClusterAuthority {
    /// The authority that issues.
    pub authority: Authority,
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
pub struct Certificates(Mutex<HashMap<String, (Security, Files)>>);

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

/// Returns the credentials in files if their authorities have issued the certificate, for this identity.
pub(crate) fn usable(files: &Files, identity: &Identity) -> anyhow::Result<Credentials> {
    let credentials = Credentials::parse(files)?;
    credentials.check_issuer()?;
    let found = &credentials.identity;
    ensure!(found == identity, "the certificate is of {found}, not of {identity}");
    Ok(credentials)
}

/// Returns the present files with these trusted authorities, unless another certificate is needed: the present one is
/// unusable, its renewal is due at `now`, or another authority issues, and all pods trust that one by now.
pub(crate) fn keep_certificate(
    present: &Files,
    identity: &Identity,
    (trusted, trusted_for): (&[u8], Duration),
    now: SystemTime,
) -> Option<Files> {
    let trusting = |authorities: Vec<u8>| {
        let files = Files { authorities, ..present.clone() };
        let credentials = usable(&files, identity).ok()?;
        (!credentials.is_renewal_due(now)).then_some(files)
    };
    let kept = trusting(trusted.to_vec())?;
    let issuer = || first_certificate(&String::from_utf8_lossy(trusted)).into_bytes();
    (trusted_for < SPREADS_WITHIN || trusting(issuer()).is_some()).then_some(kept)
}

impl ClusterAuthority {
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

    /// Returns files with a certificate of an identity: the present one, or another one if that is needed.
    fn files(&self, present: Option<&Files>, identity: &Identity) -> Result<Files, OperatorError> {
        let trusted = self.trusted();
        let authorities = (trusted.as_bytes(), clock::since(&self.created));
        let keep = |files| keep_certificate(files, identity, authorities, clock::system_time());
        if let Some(kept) = present.and_then(keep) {
            return Ok(kept);
        }
        let issued = self.authority.issue(identity, CERTIFICATE_VALID).map_err(failed)?;
        Ok(issued.into_files(&trusted))
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
    /// Returns the certificate for connections to a cluster, if there is one.
    pub fn get(&self, names: &ClusterNames) -> Option<Security> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&names.uid).map(|(security, _)| security.clone())
    }

    /// Creates the certificate for connections to a cluster, or replaces it if that is due.
    fn renew(&self, names: &ClusterNames, authority: &ClusterAuthority) -> Result<(), OperatorError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let present = all.get(&names.uid).map(|(_, files)| files);
        let identity = Identity::new(&names.in_certificates(), Role::Operator).map_err(failed)?;
        let files = authority.files(present, &identity)?;
        if present != Some(&files) {
            let tls = Tls::new(Credentials::parse(&files).map_err(failed)?);
            all.insert(names.uid.clone(), (Security::Tls(tls), files));
        }
        Ok(())
    }
}

/// Returns the state of a cluster's authority, as its watch reported it.
pub async fn read(names: &ClusterNames, context: &Context) -> AuthorityState {
    let name = names.authority();
    match context.secrets.get(names, &name) {
        Some(stored) => of_secret(names, context, &stored),
        None if context.secrets.is_absent(names, &name) => AuthorityState::Absent,
        None => fetch(names, context).await,
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
        Err(error) => {
            let message = format!("cannot read Secret {}; retrying: {error}", names.authority());
            AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, message))
        }
    }
}

/// Reads the authority in a Secret, and renews the operator's certificate of it.
fn of_secret(names: &ClusterNames, context: &Context, stored: &DynamicObject) -> AuthorityState {
    let parse = || {
        let secret = stored.clone().try_parse::<Secret>().map_err(|error| error.to_string())?;
        let authority = Arc::new(ClusterAuthority {
            authority: load(&secret)?,
            previous: entry(&secret, PREVIOUS)?,
            created: secret.metadata.creation_timestamp.unwrap_or_else(clock::now),
        });
        let renewed = context.control_planes.certificates.renew(names, &authority);
        renewed.map(|()| authority).map_err(|error| error.message())
    };
    match parse() {
        Ok(authority) => AuthorityState::Present(authority),
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
    let namespace = Some(names.namespace.as_str());
    let map = context.children.get(ChildKind::ConfigMap, namespace, &names.authorities());
    let trusted = map.as_ref().and_then(|map| map.data["data"][AUTHORITIES_FILE].as_str());
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let data = json!({
        CERTIFICATE: bytes(authority.certificate()),
        KEY: bytes(authority.key()),
        PREVIOUS: bytes(&first_certificate(trusted.unwrap_or_default())),
    });
    let name = names.authority();
    let mut secret = secret(cluster, &names, &name, &data);
    secret["immutable"] = json!(true);
    let secret = serde_json::from_value(secret).expect("made above");
    let params =
        PostParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PostParams::default() };
    let created = api(&context.client, ChildKind::Secret, namespace).create(&params, &secret).await;
    let created = created.map_err(OperatorError::api(format!("create Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    tracing::info!(secret = name, "created an authority");
    Ok(of_secret(&names, context, &created))
}

/// Builds a Secret of a cluster.
fn secret(cluster: &KVCacheCluster, names: &ClusterNames, name: &str, data: &Value) -> Value {
    let mut metadata = metadata(cluster, names, Component::ControlPlane, name);
    metadata["annotations"] = json!({ APPLIED: digest::of(&data.to_string()) });
    json!({ "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data })
}

/// Returns the first certificate of a text in PEM: that of the authority that issues.
fn first_certificate(trusted: &str) -> String {
    split(trusted).into_iter().next().unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reconcile::test_objects::names;

    const DAY: Duration = Duration::from_secs(86_400);

    fn stored(authority: &Authority, previous: &str, age: Duration) -> Arc<ClusterAuthority> {
        let authority = Authority::load(authority.certificate(), authority.key()).expect("valid PEM");
        let created = Time(clock::now().0 - age);
        Arc::new(ClusterAuthority { authority, previous: previous.to_owned(), created })
    }

    /// The authority of tests that need any one; always the same.
    pub(crate) fn any_authority() -> Arc<ClusterAuthority> {
        static ANY: std::sync::LazyLock<Arc<ClusterAuthority>> = std::sync::LazyLock::new(|| {
            stored(&Authority::create("c.n").expect("valid"), "", Duration::ZERO)
        });
        Arc::clone(&ANY)
    }

    fn two() -> [Authority; 2] {
        ["c.n", "c.n"].map(|name| Authority::create(name).expect("valid"))
    }

    #[test]
    fn certificate_is_kept_until_it_is_due_or_another_authority_is_trusted_everywhere() {
        let ([first, second], now) = (two(), clock::system_time());
        let [member, admin] =
            [Role::Member, Role::Admin].map(|role| Identity::new("c.n", role).expect("valid"));
        let issue = |authority: &Authority| {
            let issued = authority.issue(&member, CERTIFICATE_VALID).expect("valid");
            issued.into_files(authority.certificate())
        };
        let (before, after) = (issue(&first), issue(&second));
        let (old, new) = (first.certificate(), second.certificate());
        let both = &format!("{new}{old}");
        for (files, identity, trusted, trusted_for, now, is_kept) in [
            (&before, &member, old, DAY, now, true),
            (&before, &member, old, DAY, now + 59 * DAY, true),
            // Its renewal is due.
            (&before, &member, old, DAY, now + 61 * DAY, false),
            (&before, &admin, old, DAY, now, false),
            // No trusted authority has issued it.
            (&before, &member, new, Duration::ZERO, now, false),
            // Some pods do not trust the other authority yet.
            (&before, &member, both, Duration::ZERO, now, true),
            (&before, &member, both, SPREADS_WITHIN, now, false),
            (&after, &member, both, SPREADS_WITHIN, now, true),
            (&after, &member, new, DAY, now, true),
        ] {
            let kept = keep_certificate(files, identity, (trusted.as_bytes(), trusted_for), now);
            let authorities = kept.map(|files| String::from_utf8(files.authorities).expect("PEM"));
            assert_eq!(
                authorities,
                is_kept.then(|| trusted.to_owned()),
                "{identity} {trusted_for:?} {now:?}"
            );
        }
    }

    #[test]
    fn connections_of_the_operator_use_a_new_authority_once_all_pods_trust_it() {
        let [first, second] = two();
        let certificates = Certificates::default();
        let renew = |authority: &ClusterAuthority| {
            certificates.renew(&names(), authority).expect("valid");
            match certificates.get(&names()) {
                Some(Security::Tls(tls)) => tls.credentials(),
                other => panic!("{other:?}"),
            }
        };
        let before = renew(&stored(&first, "", Duration::ZERO));
        assert_eq!(before.identity.to_string(), "reprise://c.n/operator");
        for (age, is_kept, trusted) in
            [(Duration::ZERO, true, 2), (SPREADS_WITHIN, false, 2), (TRUST_PREVIOUS, false, 1)]
        {
            let now = renew(&stored(&second, first.certificate(), age));
            let is = (now.fingerprint == before.fingerprint, now.authorities.len());
            assert_eq!(is, (is_kept, trusted), "{age:?}");
            now.check_issuer().expect("a trusted authority has issued it");
        }
    }
}
