//! Version skew: running members count until they are replaced; processes report versions of untagged images.

use reprise_e2e::control_plane::Store;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

/// Version that the real member of this test reports.
const THIS: &str = env!("CARGO_PKG_VERSION");
const NEXT: &str = "0.2.0";
const FAR: &str = "0.3.0";
const DIGEST: &str = "sha256:0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f";

/// Applies a cluster with one member and images of these versions or digests.
fn cluster(k8s: &TestCluster, agents: &str, members: &str) {
    let image = |name: &str, version: &str| match version {
        DIGEST => json!({ "repository": name, "digest": version }),
        _ => json!({ "repository": name, "tag": version }),
    };
    let images =
        json!({ "agent": image("made/agent", agents), "controlPlane": image("made/members", members) });
    k8s.cluster(json!({ "controlPlane": { "replicas": 1 }, "images": images }));
}

fn wait(k8s: &TestCluster, wanted: [&str; 3]) -> String {
    k8s.wait_condition("KVCacheCluster", "c", wanted)
}

/// Image in the members' pod template.
fn template(k8s: &TestCluster) -> Value {
    let set = k8s.wait_for("StatefulSet", "c-controlplane");
    set.data["spec"]["template"]["spec"]["containers"][0]["image"].clone()
}

fn versions(k8s: &TestCluster) -> Value {
    k8s.get("KVCacheCluster", "c").expect("the object exists").data["status"]["versions"].clone()
}

#[test]
fn untagged_image_takes_reported_version_and_skew_is_limited() {
    let k8s = TestCluster::new();
    let members = k8s.env.control_plane(Store::Embedded);
    let _operator = k8s.operator_with("operator", members.address()).start().expect("the operator starts");
    cluster(&k8s, THIS, DIGEST);
    let message = wait(&k8s, ["Compatible", "Unknown", "Progressing"]);
    assert!(message.contains(&format!("image made/members@{DIGEST} has no version in its tag")), "{message}");
    assert_eq!(versions(&k8s), Value::Null, "no process has reported a version");
    k8s.make_members_ready();
    wait_until("the status has the member's version", PATIENCE, || {
        let found = versions(&k8s);
        (found["controlPlane"] == THIS && found["controlPlaneMax"] == THIS).then_some(())
    });
    for node in ["n1", "n2"] {
        k8s.agent_reports(node, "Open");
    }
    let message = wait(&k8s, ["Compatible", "True", "AsDesired"]);
    assert!(message.contains(&format!("members run {THIS}")), "{message}");

    // Images without a version are accepted, and their compatibility is unknown until their processes report.
    cluster(&k8s, DIGEST, DIGEST);
    wait(&k8s, ["Accepted", "True", "AsDesired"]);
    let message = wait(&k8s, ["Compatible", "Unknown", "Progressing"]);
    assert!(message.contains("not all agents run it yet"), "{message}");
    cluster(&k8s, FAR, DIGEST);
    let message = wait(&k8s, ["Accepted", "False", "VersionSkew"]);
    assert!(message.contains("agents of version 0.3") && message.contains(" to 0.2 first"), "{message}");
}

#[test]
fn running_member_version_limits_version_skew() {
    let k8s = TestCluster::new();
    let members = k8s.env.control_plane(Store::Embedded);
    let _operator = k8s.operator_with("operator", members.address()).start().expect("the operator starts");
    cluster(&k8s, THIS, THIS);
    k8s.make_members_ready();
    wait_until("the status has the member's version", PATIENCE, || {
        (versions(&k8s)["controlPlane"] == THIS).then_some(())
    });
    // The template has the next version, the running member has the old one, and no agent has reported.
    cluster(&k8s, NEXT, NEXT);
    wait_until("the template has the next version", PATIENCE, || {
        (template(&k8s) == json!(format!("made/members:{NEXT}"))).then_some(())
    });
    cluster(&k8s, NEXT, FAR);
    let message = wait(&k8s, ["Accepted", "False", "VersionSkew"]);
    assert!(message.contains("members of version 0.1 and members of version 0.3"), "{message}");
    assert_eq!(template(&k8s), json!(format!("made/members:{NEXT}")), "the template is unchanged");
    cluster(&k8s, NEXT, THIS);
    wait(&k8s, ["Accepted", "True", "AsDesired"]);
    wait_until("the template has the old version", PATIENCE, || {
        (template(&k8s) == json!(format!("made/members:{THIS}"))).then_some(())
    });
}
