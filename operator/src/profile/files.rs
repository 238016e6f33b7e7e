//! Contents of profiles as files beside the agents' configuration, each called by its digest.
//!
//! Beside the present revision of every profile those stay that a node of the cluster has or should have: an agent that starts anew reads
//! them again. They come from where they are, the agents' ConfigMap, so no process has to remember them; one whose text is not what its name
//! says is dropped.
//!
//! Bounded: what the present revisions leave of [`FILES_BYTES_MAX`] is for older ones, by their names. An agent that runs needs no file of a
//! revision that it has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::api::DynamicObject;
use reprise_crds::slack::{content_file, digest_of_file};
use reprise_crds::{CacheNode, KVCacheCluster};

use super::PROFILES_MAX;
use super::decisions::Decided;
use super::order::selected;
use crate::child::ChildKind;
use crate::context::Context;
use crate::digest;
use crate::names::ClusterNames;

/// Bytes of all files. A ConfigMap has 1 MiB; 16 profiles of 256 windows with 100 bytes each have 410 KiB.
const FILES_BYTES_MAX: usize = 896 << 10;

/// Files of a cluster's agents, by their names.
pub fn of(
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    cache_nodes: &[Arc<CacheNode>],
    context: &Context,
) -> BTreeMap<String, String> {
    let world = &context.world;
    let profiles = selected(cluster, context);
    let decided = profiles.iter().take(PROFILES_MAX).map(|profile| context.decisions.of(profile));
    let decided: Vec<Option<Arc<Decided>>> = decided.collect();
    let live = world.child(ChildKind::ConfigMap, Some(&names.namespace), &names.agent());
    let live = live.as_deref().map(texts).unwrap_or_default();
    let claimed = cache_nodes.iter().flat_map(|node| &node.spec.profiles);
    let mut used: BTreeSet<String> = claimed.map(|claim| claim.digest.to_string()).collect();
    used.extend(decided.iter().flatten().flat_map(|decided| decided.nodes.values().cloned()));
    let known: Vec<&Decided> = decided.iter().flatten().map(Arc::as_ref).collect();
    // Of a profile that nobody has looked at yet nobody can say what is used.
    let is_used = |digest: &str| known.len() < decided.len() || used.contains(digest);
    files(&known, live, is_used)
}

/// Entries of a ConfigMap.
fn texts(map: &DynamicObject) -> BTreeMap<String, String> {
    let entries = map.data["data"].as_object().into_iter().flatten();
    entries.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned()))).collect()
}

/// The present revisions, and of the files that are there those that are used.
fn files(
    decided: &[&Decided],
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

    fn decided(text: &str) -> Decided {
        let revision = Revision { digest: digest::of(text), text: text.to_owned() };
        Decided { revision: Some(revision), ..Decided::default() }
    }

    #[test]
    fn present_revisions_and_used_ones_stay_and_nothing_else() {
        let (new, old, unused) = (file("new"), file("old"), file("unused"));
        let mut damaged = file("damaged");
        damaged.1.push('!');
        let other = ("agent.toml".to_owned(), "[node]".to_owned());
        let live: BTreeMap<String, String> =
            [old.clone(), unused, damaged.clone(), other].into_iter().collect();
        let names = [&old.0, &damaged.0].map(|name| digest_of_file(name));
        let used = |digest: &str| names.contains(&Some(digest.to_owned()));
        let new_one = decided("new");
        let made = files(&[&new_one, &Decided::default()], live.clone(), used);
        assert_eq!(made, [new, old.clone()].into_iter().collect::<BTreeMap<_, _>>());
        // Nobody knows what is used: what is right stays.
        let made = files(&[], live, |_| true);
        assert_eq!(made, [old, file("unused")].into_iter().collect::<BTreeMap<_, _>>());
    }

    #[test]
    fn older_revisions_never_take_the_room_of_present_ones() {
        let half = "x".repeat(FILES_BYTES_MAX / 2);
        let live: BTreeMap<String, String> =
            ["a", "b", "c"].map(|end| file(&format!("{half}{end}"))).into_iter().collect();
        let present = decided("present");
        let made = files(&[&present], live, |_| true);
        assert_eq!(made.len(), 2, "the present one and one that fits beside it");
        assert!(made.values().any(|text| text == "present"));
    }
}
