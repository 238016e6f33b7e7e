//! Objects that the operator applies for the chart: the CRDs, and users' resources.

use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, ValidationDirective};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use reprise_crds::{GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde::Deserialize;

use crate::reconcile::names::RELEASE;

/// Timeout until a CRD is served, which takes about a second.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// Interval for polling whether it is.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Field manager of users' objects, which users may change afterwards.
const INSTALL_MANAGER: &str = "reprise-install";

/// Applies all CRDs and waits until they are served. They belong to the release alone, so fields of older
/// versions are removed.
///
/// # Errors
/// The API server rejects a CRD, or does not serve it in time.
pub async fn apply_definitions(client: &Client) -> anyhow::Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    for definition in reprise_crds::definitions() {
        let name = definition.name_any();
        let applied = api.patch(&name, &params, &Patch::Apply(&definition)).await;
        applied.with_context(|| format!("cannot apply CustomResourceDefinition {name}"))?;
        wait_served(client, &definition).await?;
        tracing::info!(definition = name, "applied CustomResourceDefinition");
    }
    Ok(())
}

/// Waits until objects can be listed, which is possible shortly after the CRD was created.
async fn wait_served(client: &Client, definition: &CustomResourceDefinition) -> anyhow::Result<()> {
    let names = &definition.spec.names;
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, &names.kind), &names.plural);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let first = ListParams::default().limit(1);
    let served = async {
        while api.list(&first).await.is_err() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    let served = tokio::time::timeout(SERVED_WITHIN, served).await;
    served.with_context(|| format!("the API server does not serve {} within {SERVED_WITHIN:?}", names.plural))
}

/// Applies objects of our kinds, one per YAML document, with the label of a release if one is specified.
/// Fields that other managers changed are kept: a conflict is an error.
///
/// # Errors
/// A document is not one of our kinds, or the API server rejects it.
pub async fn apply_objects(
    client: &Client,
    text: &str,
    namespace: &str,
    release: Option<&str>,
) -> anyhow::Result<()> {
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = serde_json::Value::deserialize(document).context("cannot parse the file as YAML")?;
        if value.is_null() {
            continue;
        }
        let mut object: DynamicObject =
            serde_json::from_value(value).context("a document is not a Kubernetes object")?;
        if let Some(release) = release {
            object.labels_mut().insert(RELEASE.to_owned(), release.to_owned());
        }
        apply_object(client, &object, namespace).await?;
    }
    Ok(())
}

async fn apply_object(client: &Client, object: &DynamicObject, namespace: &str) -> anyhow::Result<()> {
    let name = object.metadata.name.clone().context("an object lacks metadata.name")?;
    let types = object.types.clone().unwrap_or_default();
    let known = reprise_crds::definitions();
    let definition = known.iter().find(|known| known.spec.names.kind == types.kind);
    let Some(definition) = definition.filter(|_| types.api_version == format!("{GROUP}/{VERSION}")) else {
        bail!(
            "cannot apply {name} of kind {} and apiVersion {}: expected a kind of {GROUP}/{VERSION}",
            types.kind,
            types.api_version
        );
    };
    let gvk = GroupVersionKind::gvk(GROUP, VERSION, &types.kind);
    let resource = ApiResource::from_gvk_with_plural(&gvk, &definition.spec.names.plural);
    let api: Api<DynamicObject> = if definition.spec.scope == "Namespaced" {
        let own = object.namespace().unwrap_or_else(|| namespace.to_owned());
        Api::namespaced_with(client.clone(), &own, &resource)
    } else {
        Api::all_with(client.clone(), &resource)
    };
    let params = PatchParams::apply(INSTALL_MANAGER).validation(ValidationDirective::Strict);
    let kind = &types.kind;
    let applied = api.patch(&name, &params, &Patch::Apply(object)).await;
    applied.with_context(|| format!("cannot apply {kind} {name}"))?;
    tracing::info!(kind, name, "applied");
    Ok(())
}
