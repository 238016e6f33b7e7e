//! Versions: a member that was not replaced yet counts, an image that names no version is what its processes say.

use reprise_e2e::control_plane::Store;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::Lab;

/// What the real member of this test says that it is.
const THIS: &str = env!("CARGO_PKG_VERSION");
const NEXT: &str = "0.2.0";
const FAR: &str = "0.3.0";
const DIGEST: &str = "sha256:0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f";

/// One member, and images of this version or digest.
fn cluster(lab: &Lab, agents: &str, members: &str) {
    let image = |name: &str, version: &str| match version {
        DIGEST => json!({ "repository": name, "digest": version }),
        _ => json!({ "repository": name, "tag": version }),
    };
    let images =
        json!({ "agent": image("made/agent", agents), "controlPlane": image("made/members", members) });
    lab.cluster(json!({ "controlPlane": { "replicas": 1 }, "images": images }));
}

fn wait(lab: &Lab, wanted: [&str; 3]) -> String {
    lab.wait_condition("KVCacheCluster", "c", wanted)
}

/// The image that members are made of.
fn template(lab: &Lab) -> Value {
    let set = lab.wait_for("StatefulSet", "c-controlplane");
    set.data["spec"]["template"]["spec"]["containers"][0]["image"].clone()
}

fn versions(lab: &Lab) -> Value {
    lab.get("KVCacheCluster", "c").expect("it is there").data["status"]["versions"].clone()
}

#[test]
fn an_image_that_names_no_version_is_what_its_processes_say_and_nothing_far_comes_beside_it() {
    let lab = Lab::new();
    let members = lab.world.control_plane(Store::Embedded);
    let operator = lab.operator_with("operator", members.address()).start().expect("the operator starts");
    cluster(&lab, THIS, DIGEST);
    let said = wait(&lab, ["Compatible", "Unknown", "Progressing"]);
    assert!(said.contains(&format!("image made/members@{DIGEST} names no version")), "{said}");
    assert_eq!(versions(&lab), Value::Null, "nobody has said anything");
    lab.members_are_ready();
    wait_until("the member's own word is told", PATIENCE, || {
        let told = versions(&lab);
        (told["controlPlane"] == THIS && told["controlPlaneMax"] == THIS).then_some(())
    });
    for node in ["n1", "n2"] {
        lab.agent_reports(node, "Open");
    }
    let said = wait(&lab, ["Compatible", "True", "AsDesired"]);
    assert!(said.contains(&format!("members run {THIS}")), "{said}");

    // Neither image names a version: they are started, and nothing is claimed of what they will be.
    cluster(&lab, DIGEST, DIGEST);
    wait(&lab, ["Accepted", "True", "AsDesired"]);
    let said = wait(&lab, ["Compatible", "Unknown", "Progressing"]);
    assert!(said.contains("not all agents run it yet"), "{said}");
    cluster(&lab, FAR, DIGEST);
    let said = wait(&lab, ["Accepted", "False", "VersionSkew"]);
    assert!(said.contains("agents of version 0.3") && said.contains("go through 0.2 first"), "{said}");
    operator.kill();
}

#[test]
fn members_that_were_not_replaced_yet_are_met_by_nothing_two_versions_further() {
    let lab = Lab::new();
    let members = lab.world.control_plane(Store::Embedded);
    let operator = lab.operator_with("operator", members.address()).start().expect("the operator starts");
    cluster(&lab, THIS, THIS);
    lab.members_are_ready();
    wait_until("the member's own word is told", PATIENCE, || {
        (versions(&lab)["controlPlane"] == THIS).then_some(())
    });
    // The template is of the next version; the member that runs is not, and no agent has said anything.
    cluster(&lab, NEXT, NEXT);
    wait_until("the next version is wanted", PATIENCE, || {
        (template(&lab) == json!(format!("made/members:{NEXT}"))).then_some(())
    });
    cluster(&lab, NEXT, FAR);
    let said = wait(&lab, ["Accepted", "False", "VersionSkew"]);
    assert!(said.contains("members of version 0.1 and members of version 0.3"), "{said}");
    assert_eq!(template(&lab), json!(format!("made/members:{NEXT}")), "no pod is touched");
    cluster(&lab, NEXT, THIS);
    wait(&lab, ["Accepted", "True", "AsDesired"]);
    wait_until("it goes back", PATIENCE, || {
        (template(&lab) == json!(format!("made/members:{THIS}"))).then_some(())
    });
    operator.kill();
}
