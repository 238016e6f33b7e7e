//! The certificate of scrapers and dashboards: Secret `<cluster>-console`, with the names of entries that
//! Prometheus and browsers' proxies expect.
//!
//! Its role `console` reads metrics and states, and changes nothing. Scrapers cannot request certificates themselves,
//! and members have no access to the API server to review tokens.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, Files, KEY_FILE};
use reprise_identity::{Identity, Role};
use serde_json::json;

use super::{ClusterAuthority, failed, secret};
use crate::framework::child::ChildKind;
use crate::framework::children::api;
use crate::framework::error::OperatorError;
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::secrets::is_foreign;

/// Creates or renews the Secret. Returns why it cannot be used, if another component created it.
///
/// # Errors
/// The API server rejected the Secret.
pub(crate) async fn ensure(
    cluster: &KVCacheCluster,
    context: &Context,
    authority: &ClusterAuthority,
) -> Result<Option<Refusal>, OperatorError> {
    let names = ClusterNames::of(cluster);
    let name = names.console();
    let identity = Identity::new(&names.in_certificates(), Role::Console).map_err(failed)?;
    let renewed = |stored: Option<&DynamicObject>| {
        let present = stored.and_then(files);
        let new = authority.files(present.as_ref(), &identity)?;
        Ok::<_, OperatorError>((present.as_ref() != Some(&new)).then_some(new))
    };
    if renewed(context.secrets.get(&names, &name).as_deref())?.is_none() {
        return Ok(None);
    }
    let secrets = api(&context.client, ChildKind::Secret, Some(&names.namespace));
    let found = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    if found.as_ref().is_some_and(|found| is_foreign(&names, found)) {
        let message = format!(
            "Secret {name} is not the cluster's: delete it, so that the operator creates the certificate of scrapers"
        );
        return Ok(Some(Refusal::new(Reason::Conflict, message)));
    }
    // The watch may be behind, or lack the permission.
    let Some(new) = renewed(found.as_ref())? else { return Ok(None) };
    let data = json!({
        AUTHORITIES_FILE: ByteString(new.authorities),
        CERTIFICATE_FILE: ByteString(new.certificate),
        KEY_FILE: ByteString(new.key),
    });
    let secret = secret(cluster, &names, &name, &data);
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    let applied = secrets.patch(&name, &params, &Patch::Apply(&secret)).await;
    applied.map_err(OperatorError::api(format!("apply Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    Ok(None)
}

fn files(stored: &DynamicObject) -> Option<Files> {
    let mut data = stored.clone().try_parse::<Secret>().ok()?.data?;
    let mut take = |entry: &str| data.remove(entry).map(|bytes| bytes.0);
    Some(Files {
        authorities: take(AUTHORITIES_FILE)?,
        certificate: take(CERTIFICATE_FILE)?,
        key: take(KEY_FILE)?,
    })
}
