//! Publishes an agent's condition `StatusContested` (other writers of its status) as an event and counts it.
//! Agents have no permission to create events.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Finding, Reason, find};

use crate::framework::status::publish_event;
use crate::reconcile::context::Context;

/// Publishes a new `StatusContested` condition. After a restart of the operator the present condition is
/// published once more.
pub(super) async fn report(node: &Node, live: Option<&CacheNode>, context: &Context) {
    let condition = live.and_then(contested);
    let text =
        condition.map(|condition| format!("{:?} {}", condition.last_transition_time, condition.message));
    let is_new = context.other_writers.record_report(&node.name_any(), text);
    if let (true, Some(live), Some(condition)) = (is_new, live, condition) {
        context.metrics.record_restore("CacheNode");
        let finding = Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, &condition.message);
        publish_event(context, live, &finding).await;
    }
}

fn contested(live: &CacheNode) -> Option<&Condition> {
    let conditions = live.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    find(conditions, ConditionType::StatusContested)
        .filter(|condition| condition.status == ConditionStatus::True)
}
