//! Agents have no right to write events, so what one says of others who write its status (`StatusContested`) becomes an event here, and is counted.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Finding, Reason, find};

use crate::context::Context;
use crate::status::tell;

/// Tells what is new of what an agent says. An operator that has just begun knows of nothing, and tells it once more.
pub(super) async fn hear(node: &Node, live: Option<&CacheNode>, context: &Context) {
    let said = live.and_then(contested);
    let words = said.map(|said| format!("{:?} {}", said.last_transition_time, said.message));
    let is_news = context.disputes.hear(&node.name_any(), words);
    if let (true, Some(live), Some(said)) = (is_news, live, said) {
        context.metrics.put_back("CacheNode");
        let finding = Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, &said.message);
        tell(context, live, &finding).await;
    }
}

fn contested(live: &CacheNode) -> Option<&Condition> {
    let conditions = live.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    find(conditions, ConditionType::StatusContested).filter(|said| said.status == ConditionStatus::True)
}
