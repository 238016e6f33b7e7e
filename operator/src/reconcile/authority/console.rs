//! The certificate of scrapers and dashboards: Secret `<cluster>-console`, with the names of entries that
//! Prometheus and browsers' proxies expect.
//!
//! Its role `console` reads metrics and states, and changes nothing. Scrapers cannot request certificates themselves,
//! and members have no access to the API server to review tokens.

use std::time::SystemTime;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, Files, KEY_FILE};
use reprise_identity::{Credentials, Identity, Role};
use serde_json::json;

use super::{ClusterAuthority, SPREADS_WITHIN, failed};
use crate::framework::child::ChildKind;
use crate::framework::children::api;
use crate::framework::clock;
use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::labels::APPLIED;
use crate::framework::metrics::Write;
use crate::reconcile::cluster::build::metadata::metadata;
use crate::reconcile::context::Context;
use crate::reconcile::names::{ClusterNames, Component};

/// Creates or renews the Secret.
///
/// # Errors
/// The API server rejected the Secret.
pub(crate) async fn ensure(
    cluster: &KVCacheCluster,
    context: &Context,
    authority: &ClusterAuthority,
) -> Result<(), OperatorError> {
    let names = ClusterNames::of(cluster);
    let name = names.console();
    let stored = context.secrets.get(&names.namespace, &name);
    let identity = Identity::new(&names.in_certificates(), Role::Console).map_err(failed)?;
    let present = stored.as_deref().and_then(files);
    let Some(new) = next(present.as_ref(), authority, &identity, clock::system_time())? else {
        return Ok(());
    };
    let data = json!({
        AUTHORITIES_FILE: ByteString(new.authorities),
        CERTIFICATE_FILE: ByteString(new.certificate),
        KEY_FILE: ByteString(new.key),
    });
    let mut metadata = metadata(cluster, &names, Component::ControlPlane, &name);
    metadata["annotations"] = json!({ APPLIED: digest::of(&data.to_string()) });
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data,
    });
    let secrets = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    let applied = secrets.patch(&name, &params, &Patch::Apply(&secret)).await;
    applied.map_err(OperatorError::api(format!("apply Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    Ok(())
}

fn files(stored: &DynamicObject) -> Option<Files> {
    let secret: Secret = serde_json::from_value(serde_json::to_value(stored).ok()?).ok()?;
    let mut data = secret.data?;
    let mut take = |entry: &str| data.remove(entry).map(|bytes| bytes.0);
    Some(Files {
        authorities: take(AUTHORITIES_FILE)?,
        certificate: take(CERTIFICATE_FILE)?,
        key: take(KEY_FILE)?,
    })
}

/// Returns the files to write; `None` if the present ones are as desired.
fn next(
    present: Option<&Files>,
    authority: &ClusterAuthority,
    identity: &Identity,
    now: SystemTime,
) -> Result<Option<Files>, OperatorError> {
    let trusted = authority.trusted().into_bytes();
    let of = |files: &Files, authorities: &[u8]| {
        let files = Files { authorities: authorities.to_vec(), ..files.clone() };
        let credentials = Credentials::parse(&files).ok()?;
        credentials.check_issuer().ok()?;
        (credentials.identity == *identity && !credentials.is_renewal_due(now)).then_some(files)
    };
    let kept = present.and_then(|files| of(files, &trusted));
    let issuing = authority.authority().certificate().as_bytes();
    // As the operator's own certificate: pods need time to trust another authority.
    let is_current = |files: &Files| of(files, issuing).is_some() || authority.age() < SPREADS_WITHIN;
    if let Some(files) = kept.filter(is_current) {
        return Ok((present != Some(&files)).then_some(files));
    }
    let issued = authority.authority().issue(identity, CERTIFICATE_VALID).map_err(failed)?;
    let (certificate, key) = (issued.certificate.into_bytes(), issued.key.into_bytes());
    Ok(Some(Files { authorities: trusted, certificate, key }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::read;
    use super::*;
    use reprise_identity::Authority;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn certificate_is_kept_until_it_is_due_or_another_authority_is_trusted_everywhere() {
        let (first, second) =
            (Authority::create("c.n").expect("valid"), Authority::create("c.n").expect("valid"));
        let identity = Identity::new("c.n", Role::Console).expect("valid");
        let now = clock::system_time();
        let decide = |present: Option<&Files>, authority: &ClusterAuthority, now| {
            next(present, authority, &identity, now).expect("issued")
        };
        let only_first = read(&first, "", Duration::ZERO);
        let files = decide(None, &only_first, now).expect("a first certificate");
        assert_eq!(Credentials::parse(&files).expect("valid").identity, identity);
        assert_eq!(decide(Some(&files), &only_first, now), None);
        assert!(decide(Some(&files), &only_first, now + 61 * DAY).is_some(), "its renewal is due");
        let both = decide(Some(&files), &read(&second, first.certificate(), Duration::ZERO), now);
        let both = both.expect("both are trusted");
        assert_eq!(both.certificate, files.certificate, "pods do not trust the new authority yet");
        let spread = read(&second, first.certificate(), SPREADS_WITHIN);
        let renewed = decide(Some(&both), &spread, now).expect("a new certificate");
        assert_ne!(renewed.certificate, files.certificate);
        assert_eq!(decide(Some(&renewed), &spread, now), None);
    }
}
