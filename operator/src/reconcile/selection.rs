//! Label selection.

use std::collections::BTreeMap;

use reprise_crds::fields::{LabelSelector, LabelTerm, LabelTermOperator, Labels};

/// Whether an object has all of these labels.
pub fn has_all(wanted: &Labels, labels: &BTreeMap<String, String>) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key).is_some_and(|found| found == value.as_str()))
}

/// Whether a selector matches an object with these labels.
pub fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    has_all(&selector.match_labels, labels)
        && selector.match_expressions.iter().all(|term| meets(term, labels))
}

fn meets(term: &LabelTerm, labels: &BTreeMap<String, String>) -> bool {
    let found = labels.get(term.key.as_str());
    let listed = |found: &String| term.values.iter().any(|value| value.as_str() == found);
    match term.operator {
        LabelTermOperator::In => found.is_some_and(listed),
        LabelTermOperator::NotIn => !found.is_some_and(listed),
        LabelTermOperator::Exists => found.is_some(),
        LabelTermOperator::DoesNotExist => found.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_match_as_in_kubernetes() {
        let labels: BTreeMap<String, String> =
            [("disk", "nvme"), ("zone", "a")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let term = |operator: &str, key: &str, values: &[&str]| json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] });
        for (selector, expected) in [
            (json!({}), true),
            (json!({ "matchLabels": { "disk": "nvme" } }), true),
            (json!({ "matchLabels": { "disk": "nvme", "zone": "b" } }), false),
            (json!({ "matchLabels": { "rack": "1" } }), false),
            (term("In", "zone", &["a", "b"]), true),
            (term("In", "rack", &["a"]), false),
            (term("NotIn", "zone", &["a"]), false),
            (term("NotIn", "rack", &["a"]), true),
            (term("Exists", "zone", &[]), true),
            (term("Exists", "rack", &[]), false),
            (term("DoesNotExist", "rack", &[]), true),
            (term("DoesNotExist", "zone", &[]), false),
        ] {
            let parsed: LabelSelector = serde_json::from_value(selector.clone()).expect("a selector");
            assert_eq!(selects(&parsed, &labels), expected, "{selector}");
        }
    }
}
