//! What the operator applies for the chart: the definitions of the resources, and objects of people.

use anyhow::{Context as _, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, ValidationDirective};
use kube::core::GroupVersionKind;

use kube::runtime::wait::{await_condition, conditions};
use kube::{Client, ResourceExt};
use reprise_crds::{GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde::Deserialize;
use std::time::Duration;

use crate::names::RELEASE;

/// A definition is served within a second of being stored.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks whether it is.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The field manager of objects of people, which are theirs to change afterwards.
const PEOPLE: &str = "reprise-install";

/// Applies all definitions and waits until they are served. They are the release's alone, so older fields go.
///
/// # Errors
/// The API server refuses one, or does not serve it.
pub async fn apply_definitions(client: &Client) -> anyhow::Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    for definition in reprise_crds::definitions() {
        let name = definition.name_any();
        let applied = api.patch(&name, &params, &Patch::Apply(&definition)).await;
        applied.with_context(|| format!("the definition {name} is not taken"))?;
        let served = await_condition(api.clone(), &name, conditions::is_crd_established());
        tokio::time::timeout(SERVED_WITHIN, served)
            .await
            .with_context(|| format!("{name} is not served within {SERVED_WITHIN:?}"))?
            .with_context(|| format!("cannot watch {name}"))?;
        wait_served(client, &definition).await?;
        tracing::info!(definition = name, "applied");
    }
    Ok(())
}

/// Whoever serves the objects learns of a definition a little later than whoever stores it.
async fn wait_served(client: &Client, definition: &CustomResourceDefinition) -> anyhow::Result<()> {
    let names = &definition.spec.names;
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, &names.kind), &names.plural);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let first = ListParams::default().limit(1);
    let served = async {
        while api.list(&first).await.is_err() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let served = tokio::time::timeout(SERVED_WITHIN, served).await;
    served.with_context(|| format!("{} are not served within {SERVED_WITHIN:?}", names.plural))
}

/// Applies objects of our kinds, one YAML document each, with the label of a release if they are of one. What somebody has changed since
/// stays as it is: a conflict is refused.
///
/// # Errors
/// A document is none of our kinds, or the API server refuses it, with its words.
pub async fn apply_objects(
    client: &Client,
    text: &str,
    namespace: &str,
    release: Option<&str>,
) -> anyhow::Result<()> {
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = serde_json::Value::deserialize(document).context("the file is not YAML")?;
        if value.is_null() {
            continue;
        }
        let mut object: DynamicObject = serde_json::from_value(value).context("a document is no object")?;
        if let Some(release) = release {
            object.labels_mut().insert(RELEASE.to_owned(), release.to_owned());
        }
        apply_object(client, &object, namespace).await?;
    }
    Ok(())
}

async fn apply_object(client: &Client, object: &DynamicObject, namespace: &str) -> anyhow::Result<()> {
    let name = object.metadata.name.clone().context("an object has no name: set metadata.name")?;
    let types = object.types.clone().unwrap_or_default();
    let known = reprise_crds::definitions();
    let definition = known.iter().find(|known| known.spec.names.kind == types.kind);
    let Some(definition) = definition.filter(|_| types.api_version == format!("{GROUP}/{VERSION}")) else {
        bail!(
            "{name} is {} of {}: only kinds of {GROUP}/{VERSION} are applied",
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
    let params = PatchParams::apply(PEOPLE).validation(ValidationDirective::Strict);
    let kind = &types.kind;
    let applied = api.patch(&name, &params, &Patch::Apply(object)).await;
    applied.with_context(|| format!("{kind} {name} is not taken"))?;
    tracing::info!(kind, name, "applied");
    Ok(())
}
