//! Profile contents as files next to the agents' configuration, named by digest.
//!
//! The files contain the current revision of every profile, and older revisions that a node of the cluster
//! has or should have: an agent reads them again after a restart. Older texts are taken from the existing
//! ConfigMap, so no process has to remember them. Texts that do not match the digest in their name are
//! dropped.
//!
//! The total size is limited to [`FILES_BYTES_MAX`]: current revisions first, then older ones by name. A
//! running agent does not need the file of a revision that it has loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use reprise_crds::slack::{content_file, digest_of_file};
use reprise_crds::{CacheNode, KVCacheCluster};
use serde_json::{Map, Value};

use super::decisions::ProfileDecision;
use super::dereference::selected;
use crate::framework::child::ChildKind;
use crate::framework::digest;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;

/// Maximum size of all files in bytes. A ConfigMap is limited to 1 MiB; 16 profiles of the
/// maximum size fit.
const FILES_BYTES_MAX: usize = 896 << 10;

/// Returns the files of a cluster's agents by name.
pub fn of(
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    cache_nodes: &[Arc<CacheNode>],
    context: &Context,
) -> BTreeMap<String, String> {
    let profiles = selected(cluster, context);
    let decided: Vec<_> = profiles.iter().filter_map(|profile| context.decisions.of(profile)).collect();
    let claimed = cache_nodes.iter().flat_map(|node| &node.spec.profiles);
    let mut used: BTreeSet<String> = claimed.map(|claim| claim.digest.to_string()).collect();
    used.extend(decided.iter().flat_map(|decided| decided.nodes.values().cloned()));
    // Before the first decision on a profile, its used revisions are unknown: keep all.
    let is_used = |digest: &str| decided.len() < profiles.len() || used.contains(digest);
    let live = context.stores.children.get(ChildKind::ConfigMap, Some(&names.namespace), &names.agent());
    files(&decided, live.as_ref().and_then(|live| live.data["data"].as_object()), is_used)
}

/// Returns the current revisions, and the used ones among the existing files.
fn files(
    decided: &[Arc<ProfileDecision>],
    live: Option<&Map<String, Value>>,
    is_used: impl Fn(&str) -> bool,
) -> BTreeMap<String, String> {
    let revisions = decided.iter().filter_map(|decided| decided.revision.as_ref());
    let mut files: BTreeMap<String, String> = revisions
        .filter_map(|revision| Some((content_file(&revision.digest)?, revision.text.clone())))
        .collect();
    let mut bytes: usize = files.values().map(String::len).sum();
    for (name, text) in live.into_iter().flatten() {
        let text = text.as_str().unwrap_or_default();
        let is_right = digest_of_file(name).is_some_and(|of| is_used(&of) && digest::of(text) == of);
        if is_right && !files.contains_key(name) && bytes + text.len() <= FILES_BYTES_MAX {
            bytes += text.len();
            files.insert(name.clone(), text.to_owned());
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::super::source::Revision;
    use super::*;

    fn file(text: &str) -> (String, Value) {
        (content_file(&digest::of(text)).expect("a digest"), text.into())
    }

    fn decided(text: &str) -> Arc<ProfileDecision> {
        let revision = Revision { digest: digest::of(text), text: text.to_owned() };
        Arc::new(ProfileDecision { revision: Some(revision), ..ProfileDecision::default() })
    }

    #[test]
    fn keeps_only_current_and_used_revisions() {
        let damaged = (file("damaged").0, "!".into());
        let other = ("agent.toml".to_owned(), "".into());
        let live = Map::from_iter([file("old"), file("unused"), damaged, other]);
        let texts = |decided: &[Arc<ProfileDecision>], is_used: &dyn Fn(&str) -> bool| {
            files(decided, Some(&live), is_used).into_values().collect::<BTreeSet<_>>()
        };
        let is_used = |of: &str| of != digest::of("unused");
        let made = texts(&[decided("new"), Arc::default()], &is_used);
        assert_eq!(made, ["new", "old"].map(str::to_owned).into());
        // Used revisions are unknown: all intact files are kept.
        assert_eq!(texts(&[], &|_| true), ["old", "unused"].map(str::to_owned).into());
    }

    #[test]
    fn older_revisions_never_displace_current_ones() {
        let half = "x".repeat(FILES_BYTES_MAX / 2);
        let live = ["a", "b", "c"].map(|end| file(&format!("{half}{end}"))).into_iter().collect();
        let made = files(&[decided("present")], Some(&live), |_| true);
        assert_eq!(made.len(), 2, "the current one and one that fits in addition");
        assert!(made.values().any(|text| text == "present"));
    }
}
