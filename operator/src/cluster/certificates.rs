//! Certificates of an etcd that the operator runs.
//!
//! | Secret | what | mounted by |
//! |---|---|---|
//! | `<cluster>-etcd-ca` | authority: certificate and key | nobody |
//! | `<cluster>-etcd-tls` | the authority's certificate; `server` (of etcd, for clients and peers), `client` (of members) with their keys | etcd, members |
//!
//! The authority lasts as long as a cluster may (20 years) and is never replaced. The certificates last a year and are made anew when 60 days
//! are left, or when the Secret does not hold what was put into it.
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
use crate::put_back::{self, Ours, Outcome};
use crate::status::{PutBack, tell_put_back};

/// Annotation: the day on which certificates end.
const ENDS: &str = "reprise.dev/ends";
const AUTHORITY_YEARS: i64 = 20;
const CERTIFICATE_DAYS: i64 = 365;
/// Certificates are made anew so many days before they end.
const RENEW_DAYS: i64 = 60;

/// Whether a Secret was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Now,
    /// It is contested, and its turn comes.
    Later,
}

/// Entries of a Secret.
type Entries = BTreeMap<String, ByteString>;

/// Makes both Secrets be there and good. The digest of what pods are given.
///
/// # Errors
/// The API server did not take them; another operator may have been first.
pub async fn ensure(cluster: &KVCacheCluster, context: &Context) -> Result<String, OperatorError> {
    let names = ClusterNames::of(cluster);
    let authority = match secret(context, &names, &names.etcd_authority()).await? {
        Some(found) => entries(&found),
        None => {
            let made = new_authority(&names)?;
            store(cluster, context, &names.etcd_authority(), &made, None).await?;
            made
        }
    };
    let live = secret(context, &names, &names.etcd_tls()).await?;
    if let Some(live) = &live {
        let found = entries(live);
        if is_good(live, &found, &authority, today()) {
            return Ok(digest_of(&found));
        }
    }
    let made = new_certificates(&names, &authority)?;
    match store(cluster, context, &names.etcd_tls(), &made, live.as_ref()).await? {
        Stored::Now => Ok(digest_of(&made)),
        // Members are not restarted for what somebody else has put there.
        Stored::Later => {
            let before = live.as_ref().and_then(|live| live.annotations().get(APPLIED).cloned());
            Ok(before.unwrap_or_else(|| digest_of(&made)))
        }
    }
}

/// A Secret of this cluster; from the store, else, since a store may be late, from the API server.
async fn secret(
    context: &Context,
    names: &ClusterNames,
    name: &str,
) -> Result<Option<DynamicObject>, OperatorError> {
    if let Some(found) = context.world.child(ChildKind::Secret, Some(&names.namespace), name) {
        return Ok(Some((*found).clone()));
    }
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

/// Whether certificates hold what was put into them, are of this authority, and last long enough.
fn is_good(live: &DynamicObject, found: &Entries, authority: &Entries, today: Date) -> bool {
    let untouched = live.annotations().get(APPLIED) == Some(&digest_of(found));
    let of_authority = found.get("ca.crt").is_some() && found.get("ca.crt") == authority.get("tls.crt");
    let ends = live.annotations().get(ENDS).and_then(|ends| ends.parse::<Date>().ok());
    let renewal = ends.and_then(|ends| ends.checked_sub(Span::new().days(RENEW_DAYS)).ok());
    untouched && of_authority && renewal.is_some_and(|renewal| today < renewal)
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

    #[test]
    fn certificates_are_made_anew_before_they_end_and_when_they_were_touched() {
        let authority = new_authority(&names()).expect("an authority");
        let made = new_certificates(&names(), &authority).expect("certificates");
        let ends = add(today(), Span::new().days(CERTIFICATE_DAYS));
        let live = stored(&made, ends);
        assert_eq!(entries(&live), made, "what is stored is read back");
        assert!(is_good(&live, &made, &authority, today()));
        let late = add(ends, Span::new().days(-RENEW_DAYS));
        assert!(is_good(&live, &made, &authority, add(late, Span::new().days(-1))));
        assert!(!is_good(&live, &made, &authority, late));
        let mut touched = made.clone();
        touched.remove("client.key");
        assert!(!is_good(&live, &touched, &authority, today()));
        let other = new_authority(&names()).expect("an authority");
        assert!(!is_good(&live, &made, &other, today()));
    }
}
