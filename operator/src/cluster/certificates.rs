//! Certificates of an etcd that the operator runs.
//!
//! | Secret | what | mounted by |
//! |---|---|---|
//! | `<cluster>-etcd-ca` | authority: certificate and key | nobody |
//! | `<cluster>-etcd-tls` | the authority's certificate; `server` (of etcd, for clients and peers), `client` (of members) with their keys | etcd, members |
//!
//! The authority lasts as long as a cluster may (20 years). The certificates last a year and are made anew when 60 days are left, or when the Secret
//! does not hold what was put into it.
//!
//! etcd reads certificates at every handshake, but whom it trusts once, at its start. So a new authority parts its members, those before from those
//! after their restart, and all of them are replaced at once (`build/etcd.rs`), during which the control plane has no store. Hence an authority that is
//! lost, its Secret deleted or spoiled, is not drawn anew while there are good certificates of it, as they have all that pods need:
//!
//! | authority | certificates | what is done |
//! |---|---|---|
//! | there | good, and of it | nothing |
//! | there | others | they are made anew |
//! | lost | good | nothing; it is said, and its Secret can be put back |
//! | lost | gone, spoiled, or due | a new authority is drawn, and certificates of it |
//!
//! Invariant: of two operators that make an authority at once one is refused by the API server, and takes the other's.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::jiff::civil::Date;
use k8s_openapi::jiff::{Span, Timestamp, tz::TimeZone};
use kube::api::{DynamicObject, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use reprise_crds::cluster::EtcdMode;
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use serde_json::json;

use super::build::metadata;
use crate::child::ChildKind;
use crate::children::{self, api};
use crate::conflict::Part;
use crate::context::Context;
use crate::digest;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::{APPLIED, CLUSTER_UID, ClusterNames, Component};
use crate::plan::Refusal;
use crate::put_back::{self, Ours, Outcome};
use crate::status::{PutBack, tell_put_back};

/// Annotation: the day on which certificates end.
const ENDS: &str = "reprise.dev/ends";
const AUTHORITY_YEARS: i64 = 20;
const CERTIFICATE_DAYS: i64 = 365;
/// Certificates are made anew so many days before they end.
const RENEW_DAYS: i64 = 60;

/// What pods are given, as digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// Of certificates, keys and authority: members of the control plane read all of them once.
    pub certificates: String,
    /// Of the authority alone, which etcd reads once. `None`: the Secret is paced, and etcd's pods stay as they are.
    pub authority: Option<String>,
}

/// Whether a Secret was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Now,
    /// It is paced ([`crate::put_back`]), and is stored at its turn.
    Later,
}

/// Entries of a Secret.
type Entries = BTreeMap<String, ByteString>;

/// Both Secrets, as they are.
struct Secrets {
    authority: Option<DynamicObject>,
    certificates: Option<DynamicObject>,
}

/// What is done about them.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    /// Nothing: these certificates are good.
    Keep(Entries),
    /// Certificates of this authority are made.
    Issue(Entries),
    /// A new authority is drawn, and certificates of it.
    Draw,
}

/// Makes both Secrets be there and good, as far as they can without a new authority being drawn too early.
///
/// # Errors
/// The API server did not take them; another operator may have been first.
pub async fn ensure(cluster: &KVCacheCluster, context: &Context) -> Result<Drawn, OperatorError> {
    let names = ClusterNames::of(cluster);
    let mut secrets = Secrets::known(context, &names);
    if let Decision::Keep(found) = secrets.decide(today()) {
        return Ok(Drawn::of(&found));
    }
    secrets.ask_for_rest(context, &names).await?;
    let authority = match secrets.decide(today()) {
        Decision::Keep(found) => return Ok(Drawn::of(&found)),
        Decision::Issue(authority) => authority,
        Decision::Draw => {
            let (name, over) = (names.etcd_authority(), secrets.authority.as_ref());
            let made = new_authority(&names)?;
            match store(cluster, context, &name, &made, over).await? {
                Stored::Now => made,
                Stored::Later => return Ok(secrets.as_before()),
            }
        }
    };
    let made = new_certificates(&names, &authority)?;
    match store(cluster, context, &names.etcd_tls(), &made, secrets.certificates.as_ref()).await? {
        Stored::Now => Ok(Drawn::of(&made)),
        Stored::Later => Ok(secrets.as_before()),
    }
}

/// What to say of an authority that is lost while its certificates are good.
pub fn lost(cluster: &KVCacheCluster, context: &Context) -> Option<Refusal> {
    if cluster.spec.etcd.mode != EtcdMode::Managed {
        return None;
    }
    let names = ClusterNames::of(cluster);
    Secrets::known(context, &names).lost(&names, today())
}

impl Drawn {
    fn of(certificates: &Entries) -> Drawn {
        let authority = certificates.get("ca.crt").map(|bytes| String::from_utf8_lossy(&bytes.0));
        Drawn {
            certificates: digest_of(certificates),
            authority: authority.map(|authority| digest::of(&authority)),
        }
    }
}

impl Secrets {
    /// As far as the store has them. Their watch tells of them in the order of their writes: of an authority before its certificates.
    fn known(context: &Context, names: &ClusterNames) -> Secrets {
        let find = |name: &str| {
            let found = context.world.child(ChildKind::Secret, Some(&names.namespace), name)?;
            Some((*found).clone())
        };
        Secrets { authority: find(&names.etcd_authority()), certificates: find(&names.etcd_tls()) }
    }

    /// Asks the API server for what the store does not have, since a store may be late.
    async fn ask_for_rest(&mut self, context: &Context, names: &ClusterNames) -> Result<(), OperatorError> {
        if self.authority.is_none() {
            self.authority = secret(context, names, &names.etcd_authority()).await?;
        }
        if self.certificates.is_none() {
            self.certificates = secret(context, names, &names.etcd_tls()).await?;
        }
        Ok(())
    }

    /// The authority, unless it is lost.
    fn authority(&self) -> Option<Entries> {
        self.authority.as_ref().filter(|found| is_untouched(found)).map(entries)
    }

    /// The certificates, if they are good, and the day on which they are made anew.
    fn certificates(&self, today: Date) -> Option<(Entries, Date)> {
        let found = self.certificates.as_ref().filter(|found| is_untouched(found))?;
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
            (None, None) => Decision::Draw,
        }
    }

    fn lost(&self, names: &ClusterNames, today: Date) -> Option<Refusal> {
        let (_, renewal) = self.certificates(today).filter(|_| self.authority().is_none())?;
        let (authority, certificates) = (names.etcd_authority(), names.etcd_tls());
        let how = match self.authority {
            None => "is not there",
            Some(_) => "does not hold what was put into it",
        };
        let message = format!(
            "Secret {authority}, the authority of etcd's certificates, {how}: put it back from a backup, with its labels and annotations. etcd \
             works without it until {renewal}. On that day, or as soon as somebody deletes Secret {certificates} as well, a new authority \
             is drawn and all members of etcd are replaced at once, during which the control plane has no store and engines keep their local hits"
        );
        Some(Refusal::new(Reason::SecretInvalid, message))
    }

    /// Nobody is restarted for what somebody else has put there.
    fn as_before(&self) -> Drawn {
        let applied = self.certificates.as_ref().and_then(|found| found.annotations().get(APPLIED));
        Drawn { certificates: applied.cloned().unwrap_or_default(), authority: None }
    }
}

/// A Secret of this cluster, as the API server has it.
async fn secret(
    context: &Context,
    names: &ClusterNames,
    name: &str,
) -> Result<Option<DynamicObject>, OperatorError> {
    let api = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    let found = api.get_opt(name).await.map_err(OperatorError::api(format!("look at Secret {name}")))?;
    Ok(found.filter(|found| found.labels().get(CLUSTER_UID) == Some(&names.uid)))
}

fn entries(secret: &DynamicObject) -> Entries {
    serde_json::from_value(secret.data["data"].clone()).unwrap_or_default()
}

fn digest_of(entries: &Entries) -> String {
    digest::of(&json!(entries).to_string())
}

/// Whether a Secret holds what was put into it.
fn is_untouched(secret: &DynamicObject) -> bool {
    secret.annotations().get(APPLIED) == Some(&digest_of(&entries(secret)))
}

/// Writes a Secret: a new one only if there is none, a renewed one only over the one that was looked at.
async fn store(
    cluster: &KVCacheCluster,
    context: &Context,
    name: &str,
    entries: &Entries,
    over: Option<&DynamicObject>,
) -> Result<Stored, OperatorError> {
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
            let ours = Ours { api: &api, key: &key, name, part: Part::Object, params, body: &whole };
            let stored = put_back::apply(&context.disputes, &ours).await.map_err(OperatorError::api(what))?;
            match stored {
                Outcome::Written(_) => {}
                Outcome::PutBack(_, taken) => {
                    let what = live.object_ref(&ChildKind::Secret.resource());
                    let put_back = PutBack { kind: ChildKind::Secret.as_str(), what, taken };
                    tell_put_back(context, cluster, &put_back).await;
                }
                Outcome::Waits(_) => return Ok(Stored::Later),
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
    context.metrics.wrote("Secret", Write::Apply);
    tracing::info!(secret = name, "certificates made");
    Ok(Stored::Now)
}

/// The day, everywhere.
fn today() -> Date {
    Timestamp::now().to_zoned(TimeZone::UTC).date()
}

fn add(day: Date, span: Span) -> Date {
    day.checked_add(span).expect("a day of this millennium")
}

/// Parameters of a certificate that is valid from yesterday on, since clocks differ.
fn params(name: &str, hosts: Vec<String>, lasts: Span) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, name);
    let at = |day: Date| {
        let part = |part: i8| u8::try_from(part).expect("months and days count from one");
        date_time_ymd(i32::from(day.year()), part(day.month()), part(day.day()))
    };
    params.not_before = at(add(today(), Span::new().days(-1)));
    // The day that is noted is the last one on which it is good.
    params.not_after = at(add(add(today(), lasts), Span::new().days(1)));
    Ok(params)
}

/// The same for the same cluster, so that an issuer can be made of the key alone.
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
    // A member of etcd is a client of its peers, with the same certificate.
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

/// Names of both Secrets, which are no children that are built.
pub fn kept(names: &ClusterNames) -> [(ChildKind, String); 2] {
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

    /// Somebody has taken an entry out of a Secret.
    fn without(mut secret: DynamicObject, entry: &str) -> DynamicObject {
        let removed = secret.data["data"].as_object_mut().expect("entries").remove(entry);
        assert!(removed.is_some(), "{entry}");
        secret
    }

    /// An authority, certificates of it, and both stored.
    fn drawn() -> (Entries, Entries, Secrets) {
        let authority = new_authority(&names()).expect("an authority");
        let made = new_certificates(&names(), &authority).expect("certificates");
        let ends = add(today(), Span::new().days(CERTIFICATE_DAYS));
        let secrets =
            Secrets { authority: Some(stored(&authority, ends)), certificates: Some(stored(&made, ends)) };
        (authority, made, secrets)
    }

    /// The first day on which certificates of today are made anew.
    fn renewal() -> Date {
        add(today(), Span::new().days(CERTIFICATE_DAYS - RENEW_DAYS))
    }

    #[test]
    fn certificates_are_made_anew_before_they_end_and_when_they_were_touched() {
        let (authority, made, mut secrets) = drawn();
        assert_eq!(secrets.decide(today()), Decision::Keep(made.clone()), "what is stored is read back");
        assert_eq!(secrets.decide(add(renewal(), Span::new().days(-1))), Decision::Keep(made));
        let anew = Decision::Issue(authority);
        assert_eq!(secrets.decide(renewal()), anew);
        let good = secrets.certificates.take();
        assert_eq!(secrets.decide(today()), anew, "they are gone");
        for touched in ["client.key", "ca.crt"] {
            secrets.certificates = good.clone().map(|good| without(good, touched));
            assert_eq!(secrets.decide(today()), anew, "{touched}");
        }
        let (other, _, _) = drawn();
        let restored = Secrets { authority: Some(stored(&other, renewal())), certificates: good };
        assert_eq!(restored.decide(today()), Decision::Issue(other), "they are of another authority");
        assert_eq!(restored.lost(&names(), today()), None);
    }

    #[test]
    fn a_lost_authority_is_said_and_drawn_anew_only_without_good_certificates() {
        let (_, made, secrets) = drawn();
        assert_eq!(secrets.lost(&names(), today()), None);
        let spoiled = secrets.authority.clone().map(|found| without(found, "tls.key"));
        for (authority, how) in [(None, "is not there"), (spoiled, "does not hold what was put into it")] {
            let mut lost = Secrets { authority, certificates: secrets.certificates.clone() };
            let said = lost.lost(&names(), today()).expect(how);
            assert_eq!(said.reason, Reason::SecretInvalid);
            let until = format!("until {}.", renewal());
            for words in ["Secret c-etcd-ca,", how, until.as_str(), "deletes Secret c-etcd-tls as well"] {
                assert!(said.message.contains(words), "{words}: {}", said.message);
            }
            assert_eq!(lost.decide(add(renewal(), Span::new().days(-1))), Decision::Keep(made.clone()));
            // It would be said for ever after.
            assert_eq!((lost.decide(renewal()), lost.lost(&names(), renewal())), (Decision::Draw, None));
            let good = lost.certificates.take();
            assert_eq!((lost.decide(today()), lost.lost(&names(), today())), (Decision::Draw, None));
            lost.certificates = good.map(|good| without(good, "server.key"));
            assert_eq!((lost.decide(today()), lost.lost(&names(), today())), (Decision::Draw, None));
        }
    }

    #[test]
    fn the_digest_of_an_authority_is_that_of_all_its_certificates() {
        let (authority, made, _) = drawn();
        let (first, renewed) = (Drawn::of(&made), new_certificates(&names(), &authority).expect("renewed"));
        let renewed = Drawn::of(&renewed);
        assert!(first.authority.is_some());
        assert_eq!(first.authority, renewed.authority);
        assert_ne!(first.certificates, renewed.certificates);
        let (_, others, _) = drawn();
        assert_ne!(first.authority, Drawn::of(&others).authority);
    }

    #[test]
    fn a_secret_that_is_paced_changes_no_pod() {
        let (_, made, mut secrets) = drawn();
        secrets.certificates = secrets.certificates.map(|found| without(found, "server.key"));
        assert_eq!(secrets.as_before(), Drawn { certificates: digest_of(&made), authority: None });
    }
}
