//! Certificates of a managed etcd.
//!
//! | Secret | content | mounted by | |---|---|---| | `<cluster>-etcd-ca` | CA: certificate and key | not
//! mounted | | `<cluster>-etcd-tls` | CA certificate; `server` certificate (of etcd, for clients and peers)
//! and `client` certificate (of members), with keys | etcd, members |
//!
//! The CA is valid for 20 years. The certificates are valid for a year. They are renewed 60 days before they
//! expire, or when the Secret's content was modified.
//!
//! etcd reads its certificates at every handshake, but the CA only when it starts. After a change of the CA,
//! restarted members and running ones do not trust each other. All members are therefore replaced at once
//! (`build/etcd.rs`), and the control plane has no store meanwhile. For this reason a lost CA (its Secret
//! deleted or modified) is not re-created while valid certificates exist, which are all that pods need:
//!
//! | CA | certificates | action | |---|---|---| | present | valid, issued by this CA | none | | present |
//! other | issue certificates | | lost | valid | none; report it, so that the Secret can be restored | | lost
//! | missing, modified or due for renewal | create a CA and issue certificates |
//!
//! Invariant: if two operators create a CA at the same time, the API server rejects one of them, which then
//! uses the other's CA.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::jiff::civil::Date;
use k8s_openapi::jiff::{Span, tz::TimeZone};
use kube::ResourceExt;
use kube::api::{DynamicObject, PatchParams, PostParams};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use reprise_crds::cluster::EtcdMode;
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use serde_json::json;

use super::build::metadata::metadata;
use crate::framework::child::ChildKind;
use crate::framework::children::{self, api};
use crate::framework::clock;
use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::events::Subject;
use crate::framework::field_ownership::conflict::Part;
use crate::framework::field_ownership::restore::{self, Extras, OwnedWrite, WriteOutcome};
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::names::{ClusterNames, Component};

/// Annotation with the day on which certificates expire.
const ENDS: &str = "reprise.dev/ends";
const AUTHORITY_YEARS: i64 = 20;
const CERTIFICATE_DAYS: i64 = 365;
/// Days before expiry at which certificates are renewed.
const RENEW_DAYS: i64 = 60;

/// Digests of the certificates, for annotations of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateDigests {
    /// Digest of certificates, keys and CA; members of the control plane read them once.
    pub certificates: String,
    /// Digest of the CA, which etcd reads once. `None` if restoring the Secret is delayed; etcd's pods then
    /// stay as they are.
    pub authority: Option<String>,
}

/// Result of writing a Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecretWrite {
    Done,
    /// Restoring the Secret is paced ([`crate::framework::field_ownership::restore`]); it is written later.
    Deferred,
}

/// Entries of a Secret.
type Entries = BTreeMap<String, ByteString>;

/// Both Secrets as they are stored.
struct Secrets {
    authority: Option<DynamicObject>,
    certificates: Option<DynamicObject>,
}

/// Action on the Secrets.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    /// Keep these valid certificates.
    Keep(Entries),
    /// Issue certificates with this CA.
    Issue(Entries),
    /// Create a CA and issue certificates.
    CreateAuthority,
}

/// Creates or renews both Secrets. A new CA is created only if no valid certificates are left.
///
/// # Errors
/// The API server rejected a write, for example because another operator was faster.
pub async fn ensure(
    cluster: &KVCacheCluster,
    context: &Context,
) -> Result<CertificateDigests, OperatorError> {
    let names = ClusterNames::of(cluster);
    let mut secrets = Secrets::from_store(context, &names);
    if let Decision::Keep(found) = secrets.decide(today()) {
        return Ok(CertificateDigests::of(&found));
    }
    // The store may lag: decide again with the API server's Secrets before replacing anything.
    secrets.fetch_missing(context, &names).await?;
    let authority = match secrets.decide(today()) {
        Decision::Keep(found) => return Ok(CertificateDigests::of(&found)),
        Decision::Issue(authority) => authority,
        Decision::CreateAuthority => {
            let (name, over) = (names.etcd_authority(), secrets.authority.as_ref());
            let made = new_authority(&names)?;
            match store(cluster, context, &name, &made, over).await? {
                SecretWrite::Done => made,
                SecretWrite::Deferred => return Ok(secrets.last_applied()),
            }
        }
    };
    let made = new_certificates(&names, &authority)?;
    match store(cluster, context, &names.etcd_tls(), &made, secrets.certificates.as_ref()).await? {
        SecretWrite::Done => Ok(CertificateDigests::of(&made)),
        SecretWrite::Deferred => Ok(secrets.last_applied()),
    }
}

/// Returns a refusal if the CA is lost while its certificates are valid.
pub fn lost_authority(cluster: &KVCacheCluster, context: &Context) -> Option<Refusal> {
    if cluster.spec.etcd.mode != EtcdMode::Managed {
        return None;
    }
    let names = ClusterNames::of(cluster);
    Secrets::from_store(context, &names).lost(&names, today())
}

impl CertificateDigests {
    fn of(certificates: &Entries) -> CertificateDigests {
        let authority = certificates.get("ca.crt").map(|bytes| String::from_utf8_lossy(&bytes.0));
        CertificateDigests {
            certificates: digest_of(certificates),
            authority: authority.map(|authority| digest::of(&authority)),
        }
    }
}

impl Secrets {
    /// Reads both Secrets from the local store. Their watch delivers writes in order, so it delivers a CA
    /// before its certificates.
    fn from_store(context: &Context, names: &ClusterNames) -> Secrets {
        let find = |name: &str| {
            let found = context.secrets.get(&names.namespace, name)?;
            Some((*found).clone())
        };
        Secrets { authority: find(&names.etcd_authority()), certificates: find(&names.etcd_tls()) }
    }

    /// Reads Secrets that are missing in the local store, which may lag, from the API server.
    async fn fetch_missing(&mut self, context: &Context, names: &ClusterNames) -> Result<(), OperatorError> {
        if self.authority.is_none() {
            self.authority = secret(context, names, &names.etcd_authority()).await?;
        }
        if self.certificates.is_none() {
            self.certificates = secret(context, names, &names.etcd_tls()).await?;
        }
        Ok(())
    }

    /// Returns the CA, unless it is lost.
    fn authority(&self) -> Option<Entries> {
        self.authority.as_ref().filter(|found| is_unmodified(found)).map(entries)
    }

    /// Returns the certificates if they are valid, with the day of their renewal.
    fn certificates(&self, today: Date) -> Option<(Entries, Date)> {
        let found = self.certificates.as_ref().filter(|found| is_unmodified(found))?;
        let ends = found.annotations().get(ENDS)?.parse::<Date>().ok()?;
        let renewal = ends.checked_sub(Span::new().days(RENEW_DAYS)).ok()?;
        (today < renewal).then(|| (entries(found), renewal))
    }

    fn decide(&self, today: Date) -> Decision {
        let certificates = self.certificates(today).map(|(certificates, _)| certificates);
        match (self.authority(), certificates) {
            (Some(authority), Some(found)) if found.get("ca.crt") == authority.get("tls.crt") => {
                Decision::Keep(found)
            }
            (None, Some(found)) => Decision::Keep(found),
            (Some(authority), _) => Decision::Issue(authority),
            (None, None) => Decision::CreateAuthority,
        }
    }

    fn lost(&self, names: &ClusterNames, today: Date) -> Option<Refusal> {
        let (_, renewal) = self.certificates(today).filter(|_| self.authority().is_none())?;
        let (authority, certificates) = (names.etcd_authority(), names.etcd_tls());
        let how = match self.authority {
            None => "does not exist",
            Some(_) => "was modified",
        };
        let message = format!(
            "Secret {authority}, the CA of etcd's certificates, {how}: restore it from a backup, with its labels and annotations. etcd \
             works without it until {renewal}. On that day, or if Secret {certificates} is deleted as well, the operator creates a new CA and \
             replaces all members of etcd at once. The control plane has no store meanwhile, and engines get only local hits"
        );
        Some(Refusal::new(Reason::SecretInvalid, message))
    }

    /// Digests of the content last applied, so that a foreign modification of the Secret restarts no pods.
    fn last_applied(&self) -> CertificateDigests {
        let applied = self.certificates.as_ref().and_then(|found| found.annotations().get(APPLIED));
        CertificateDigests { certificates: applied.cloned().unwrap_or_default(), authority: None }
    }
}

/// Reads a Secret of this cluster from the API server.
async fn secret(
    context: &Context,
    names: &ClusterNames,
    name: &str,
) -> Result<Option<DynamicObject>, OperatorError> {
    let api = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    let found = api.get_opt(name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    Ok(found.filter(|found| found.labels().get(CLUSTER_UID) == Some(&names.uid)))
}

fn entries(secret: &DynamicObject) -> Entries {
    serde_json::from_value(secret.data["data"].clone()).unwrap_or_default()
}

fn digest_of(entries: &Entries) -> String {
    digest::of(&json!(entries).to_string())
}

/// Whether a Secret still has the content that was applied.
fn is_unmodified(secret: &DynamicObject) -> bool {
    secret.annotations().get(APPLIED) == Some(&digest_of(&entries(secret)))
}

/// Writes a Secret. A new one must not exist; a renewed one must not have changed since it was read.
async fn store(
    cluster: &KVCacheCluster,
    context: &Context,
    name: &str,
    entries: &Entries,
    over: Option<&DynamicObject>,
) -> Result<SecretWrite, OperatorError> {
    let names = ClusterNames::of(cluster);
    let mut metadata = metadata(cluster, &names, Component::Etcd, name);
    let ends = add(today(), Span::new().days(CERTIFICATE_DAYS));
    metadata["annotations"] = json!({ APPLIED: digest_of(entries), ENDS: ends.to_string() });
    let mut whole = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": entries,
    });
    let api = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    let what = format!("store Secret {name}");
    match over {
        Some(live) => {
            whole["metadata"]["resourceVersion"] = json!(live.metadata.resource_version);
            let key = children::key(ChildKind::Secret, Some(&names.namespace), name);
            let params = PatchParams::apply(OPERATOR_FIELD_MANAGER);
            let ours = OwnedWrite {
                api: &api,
                kind: ChildKind::Secret.as_str(),
                key: &key,
                name,
                part: Part::Object,
                params,
                body: &whole,
                extras: Extras::Kept,
                subject: &Subject::of(cluster),
            };
            match restore::apply(context, &ours, |_| None).await.map_err(OperatorError::api(what))? {
                WriteOutcome::Written(_) => {}
                WriteOutcome::Paced(_) => return Ok(SecretWrite::Deferred),
            }
        }
        None => {
            let whole: DynamicObject = serde_json::from_value(whole).expect("made above");
            let params = PostParams {
                field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()),
                ..PostParams::default()
            };
            api.create(&params, &whole).await.map_err(OperatorError::api(what))?;
        }
    }
    context.metrics.record_write("Secret", Write::Apply);
    tracing::info!(secret = name, "created certificates");
    Ok(SecretWrite::Done)
}

/// Returns the current day in UTC.
fn today() -> Date {
    clock::now().0.to_zoned(TimeZone::UTC).date()
}

fn add(day: Date, span: Span) -> Date {
    day.checked_add(span).expect("a date in range")
}

/// Parameters of a certificate that is valid from yesterday on, because clocks differ.
fn params(name: &str, hosts: Vec<String>, lasts: Span) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, name);
    let at = |day: Date| {
        let part = |part: i8| u8::try_from(part).expect("months and days are positive");
        date_time_ymd(i32::from(day.year()), part(day.month()), part(day.day()))
    };
    params.not_before = at(add(today(), Span::new().days(-1)));
    // The annotated day is the last day on which the certificate is valid.
    params.not_after = at(add(add(today(), lasts), Span::new().days(1)));
    Ok(params)
}

/// Parameters of a CA. They depend only on the cluster, so an issuer can be rebuilt from the key.
fn authority_params(names: &ClusterNames) -> Result<CertificateParams, rcgen::Error> {
    let name = format!("reprise etcd of {} {}", names.key(), names.uid);
    let mut params = params(&name, Vec::new(), Span::new().years(AUTHORITY_YEARS))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn new_authority(names: &ClusterNames) -> Result<Entries, OperatorError> {
    let key = KeyPair::generate()?;
    let certificate = authority_params(names)?.self_signed(&key)?;
    Ok(as_entries([("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem())]))
}

fn new_certificates(names: &ClusterNames, authority: &Entries) -> Result<Entries, OperatorError> {
    let text = |entry: &str| {
        let bytes = authority.get(entry).map(|bytes| bytes.0.clone()).unwrap_or_default();
        String::from_utf8(bytes).unwrap_or_default()
    };
    let issuer = Issuer::new(authority_params(names)?, KeyPair::from_pem(&text("tls.key"))?);
    let issue = |name: &str, hosts: Vec<String>, uses: Vec<ExtendedKeyUsagePurpose>| {
        let key = KeyPair::generate()?;
        let mut params = params(name, hosts, Span::new().days(CERTIFICATE_DAYS))?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = uses;
        Ok::<_, rcgen::Error>((params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
    };
    let service = format!("{}.{}.svc", names.etcd(), names.namespace);
    let hosts = [
        format!("*.{service}"),
        format!("*.{service}.cluster.local"),
        service,
        "localhost".to_owned(),
        "127.0.0.1".to_owned(),
    ];
    // A member of etcd is also a client of its peers, with the same certificate.
    let both = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let server = issue("etcd", hosts.into(), both)?;
    let client = issue("reprise-controlplane", Vec::new(), vec![ExtendedKeyUsagePurpose::ClientAuth])?;
    Ok(as_entries([
        ("ca.crt", text("tls.crt")),
        ("server.crt", server.0),
        ("server.key", server.1),
        ("client.crt", client.0),
        ("client.key", client.1),
    ]))
}

fn as_entries<const N: usize>(texts: [(&str, String); N]) -> Entries {
    texts.into_iter().map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes()))).collect()
}

/// Returns the names of both Secrets, which are not among the built children.
pub fn secret_names(names: &ClusterNames) -> [(ChildKind, String); 2] {
    [names.etcd_authority(), names.etcd_tls()].map(|name| (ChildKind::Secret, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    fn stored(entries: &Entries, ends: Date) -> DynamicObject {
        let annotations = json!({ APPLIED: digest_of(entries), ENDS: ends.to_string() });
        let whole = json!({ "metadata": { "name": "s", "annotations": annotations }, "data": entries });
        serde_json::from_value(whole).expect("a Secret")
    }

    /// Removes an entry from a Secret, as a user might.
    fn without(mut secret: DynamicObject, entry: &str) -> DynamicObject {
        let removed = secret.data["data"].as_object_mut().expect("entries").remove(entry);
        assert!(removed.is_some(), "{entry}");
        secret
    }

    /// A CA, its certificates, and the Secrets with both.
    fn new_secrets() -> (Entries, Entries, Secrets) {
        let authority = new_authority(&names()).expect("an authority");
        let made = new_certificates(&names(), &authority).expect("certificates");
        let ends = add(today(), Span::new().days(CERTIFICATE_DAYS));
        let secrets =
            Secrets { authority: Some(stored(&authority, ends)), certificates: Some(stored(&made, ends)) };
        (authority, made, secrets)
    }

    /// The day on which certificates issued today are renewed.
    fn renewal() -> Date {
        add(today(), Span::new().days(CERTIFICATE_DAYS - RENEW_DAYS))
    }

    #[test]
    fn renews_certificates_before_expiry_and_after_modification() {
        let (authority, made, mut secrets) = new_secrets();
        assert_eq!(secrets.decide(today()), Decision::Keep(made.clone()), "reads back the stored entries");
        assert_eq!(secrets.decide(add(renewal(), Span::new().days(-1))), Decision::Keep(made));
        let issue = Decision::Issue(authority);
        assert_eq!(secrets.decide(renewal()), issue);
        let good = secrets.certificates.take();
        assert_eq!(secrets.decide(today()), issue, "the certificates are missing");
        for touched in ["client.key", "ca.crt"] {
            secrets.certificates = good.clone().map(|good| without(good, touched));
            assert_eq!(secrets.decide(today()), issue, "{touched}");
        }
        let (other, _, _) = new_secrets();
        let restored = Secrets { authority: Some(stored(&other, renewal())), certificates: good };
        assert_eq!(restored.decide(today()), Decision::Issue(other), "another CA issued them");
        assert_eq!(restored.lost(&names(), today()), None);
    }

    #[test]
    fn reports_lost_ca_and_re_creates_it_only_without_valid_certificates() {
        let (_, made, secrets) = new_secrets();
        assert_eq!(secrets.lost(&names(), today()), None);
        let spoiled = secrets.authority.clone().map(|found| without(found, "tls.key"));
        for (authority, how) in [(None, "does not exist"), (spoiled, "was modified")] {
            let mut lost = Secrets { authority, certificates: secrets.certificates.clone() };
            let refusal = lost.lost(&names(), today()).expect(how);
            assert_eq!(refusal.reason, Reason::SecretInvalid);
            let until = format!("until {}.", renewal());
            for part in ["Secret c-etcd-ca,", how, until.as_str(), "if Secret c-etcd-tls is deleted as well"]
            {
                assert!(refusal.message.contains(part), "{part}: {}", refusal.message);
            }
            assert_eq!(lost.decide(add(renewal(), Span::new().days(-1))), Decision::Keep(made.clone()));
            // The refusal ends with the renewal.
            assert_eq!(
                (lost.decide(renewal()), lost.lost(&names(), renewal())),
                (Decision::CreateAuthority, None)
            );
            let good = lost.certificates.take();
            assert_eq!(
                (lost.decide(today()), lost.lost(&names(), today())),
                (Decision::CreateAuthority, None)
            );
            lost.certificates = good.map(|good| without(good, "server.key"));
            assert_eq!(
                (lost.decide(today()), lost.lost(&names(), today())),
                (Decision::CreateAuthority, None)
            );
        }
    }

    #[test]
    fn ca_digest_is_the_same_for_all_its_certificates() {
        let (authority, made, _) = new_secrets();
        let (first, renewed) =
            (CertificateDigests::of(&made), new_certificates(&names(), &authority).expect("renewed"));
        let renewed = CertificateDigests::of(&renewed);
        assert!(first.authority.is_some());
        assert_eq!(first.authority, renewed.authority);
        assert_ne!(first.certificates, renewed.certificates);
        let (_, others, _) = new_secrets();
        assert_ne!(first.authority, CertificateDigests::of(&others).authority);
    }

    #[test]
    fn paced_secret_changes_no_pods() {
        let (_, made, mut secrets) = new_secrets();
        secrets.certificates = secrets.certificates.map(|found| without(found, "server.key"));
        assert_eq!(
            secrets.last_applied(),
            CertificateDigests { certificates: digest_of(&made), authority: None }
        );
    }
}
