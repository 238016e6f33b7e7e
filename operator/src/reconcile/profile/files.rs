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

use kube::api::DynamicObject;
use reprise_crds::slack::{content_file, digest_of_file};
use reprise_crds::{CacheNode, KVCacheCluster};

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
    let stores = &context.stores;
    let profiles = selected(cluster, context);
    let decided = profiles.iter().map(|profile| context.decisions.of(profile));
    let decided: Vec<Option<Arc<ProfileDecision>>> = decided.collect();
    let live = stores.children.get(ChildKind::ConfigMap, Some(&names.namespace), &names.agent());
    let live = live.as_deref().map(texts).unwrap_or_default();
    let claimed = cache_nodes.iter().flat_map(|node| &node.spec.profiles);
    let mut used: BTreeSet<String> = claimed.map(|claim| claim.digest.to_string()).collect();
    used.extend(decided.iter().flatten().flat_map(|decided| decided.nodes.values().cloned()));
    let known: Vec<&ProfileDecision> = decided.iter().flatten().map(Arc::as_ref).collect();
    // Before the first decision on a profile, its used revisions are unknown: keep all.
    let is_used = |digest: &str| known.len() < decided.len() || used.contains(digest);
    files(&known, live, is_used)
}

/// Returns the entries of a ConfigMap.
fn texts(map: &DynamicObject) -> BTreeMap<String, String> {
    let entries = map.data["data"].as_object().into_iter().flatten();
    entries.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned()))).collect()
}

/// Returns the current revisions, and the used ones among the existing files.
fn files(
    decided: &[&ProfileDecision],
    live: BTreeMap<String, String>,
    is_used: impl Fn(&str) -> bool,
) -> BTreeMap<String, String> {
    let revisions = decided.iter().filter_map(|decided| decided.revision.as_ref());
    let mut files: BTreeMap<String, String> = revisions
        .filter_map(|revision| Some((content_file(&revision.digest)?, revision.text.clone())))
        .collect();
    let mut bytes: usize = files.values().map(String::len).sum();
    for (name, text) in live {
        let is_right = digest_of_file(&name).is_some_and(|of| is_used(&of) && digest::of(&text) == of);
        if !is_right || files.contains_key(&name) || bytes + text.len() > FILES_BYTES_MAX {
            continue;
        }
        bytes += text.len();
        files.insert(name, text);
    }
    files
}

#[cfg(test)]
mod tests {
    use super::super::content::Revision;
    use super::*;

    fn file(text: &str) -> (String, String) {
        (content_file(&digest::of(text)).expect("a digest"), text.to_owned())
    }

    fn decided(text: &str) -> ProfileDecision {
        let revision = Revision { digest: digest::of(text), text: text.to_owned() };
        ProfileDecision { revision: Some(revision), ..ProfileDecision::default() }
    }

    #[test]
    fn keeps_only_current_and_used_revisions() {
        let (new, old, unused) = (file("new"), file("old"), file("unused"));
        let (damaged, other) =
            ((file("damaged").0, "!".to_owned()), ("agent.toml".to_owned(), String::new()));
        let live = BTreeMap::from([old.clone(), unused.clone(), damaged, other]);
        let is_used = |of: &str| of != digest::of("unused");
        let made = files(&[&decided("new"), &ProfileDecision::default()], live.clone(), is_used);
        assert_eq!(made, BTreeMap::from([new, old.clone()]));
        // Used revisions are unknown: all intact files are kept.
        assert_eq!(files(&[], live, |_| true), BTreeMap::from([old, unused]));
    }

    #[test]
    fn older_revisions_never_displace_current_ones() {
        let half = "x".repeat(FILES_BYTES_MAX / 2);
        let live = ["a", "b", "c"].map(|end| file(&format!("{half}{end}"))).into_iter().collect();
        let made = files(&[&decided("present")], live, |_| true);
        assert_eq!(made.len(), 2, "the current one and one that fits in addition");
        assert!(made.values().any(|text| text == "present"));
    }
}
