//! Decides what is to be written of a node's allocations, and writes it; of one node one at a time.
//!
//! What was stored when the node's turn came is what is decided by. Each write names the version that it changes, so that a decision about
//! something that has changed since is refused by the API server, and made anew.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use reprise_crds::{GPUQueueAllocation, OPERATOR_FIELD_MANAGER};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::build::{Step, What, steps};
use super::dereference::asked;
use super::status::Said;
use crate::clock;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Finalizer, set};
use crate::metrics::Write;
use crate::names::QUEUES_FINALIZER;
use crate::status::tell;

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;

/// So many nodes are decided about at once, at the most.
const AT_ONCE: usize = 16;

/// Whose turn it is to write of a node. Several nodes may share one.
#[derive(Debug, Default)]
pub struct Turns([Mutex<()>; AT_ONCE]);

impl Turns {
    fn of(&self, node: &str) -> &Mutex<()> {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let index = hasher.finish() as usize % AT_ONCE;
        &self.0[index]
    }
}

/// Makes all allocations of a node what they should be now.
///
/// # Errors
/// The API server did not take something; what comes after it is not written.
pub async fn settle(node: &str, context: &Context) -> Result<(), OperatorError> {
    let _turn = context.turns.of(node).lock().await;
    let found = asked(node, context).await?;
    for step in steps(&found, &clock::now()) {
        act(&step, context).await?;
    }
    Ok(())
}

async fn act(step: &Step, context: &Context) -> Result<(), OperatorError> {
    let object = &*step.object;
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<GPUQueueAllocation> = Api::namespaced(context.client.clone(), &namespace);
    match &step.what {
        What::Hold => set(context, object, &api, QUEUES_FINALIZER, Finalizer::Wanted).await.map(drop),
        What::LetGo => set(context, object, &api, QUEUES_FINALIZER, Finalizer::Unwanted).await.map(drop),
        What::GiveBack(said) | What::Grant(said) | What::Say(said) => {
            write(object, &api, said, context).await
        }
    }
}

/// Writes a status. What the agent has in it stays: a change of that is another version.
async fn write(
    object: &GPUQueueAllocation,
    api: &Api<GPUQueueAllocation>,
    said: &Said,
    context: &Context,
) -> Result<(), OperatorError> {
    let (name, status) = (object.name_any(), &said.status);
    let grants = if status.allocations.is_empty() { Value::Null } else { json!(status.allocations) };
    let body = json!({
        "metadata": { "resourceVersion": object.resource_version() },
        "status": {
            "observedGeneration": status.observed_generation,
            "allocations": grants,
            "expiresAt": status.expires_at,
            "conditions": status.conditions,
        },
    });
    let params =
        PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    match api.patch_status(&name, &params, &Patch::Merge(&body)).await {
        Ok(_) => {}
        // Deleted meanwhile, and its grant with it.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write the status of GPUQueueAllocation {name}"))(error));
        }
    }
    context.metrics.wrote("GPUQueueAllocation", Write::Status);
    for finding in &said.news {
        tell(context, object, finding).await;
    }
    Ok(())
}
