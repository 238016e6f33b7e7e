//! A node with its agent, and its `CacheNode` as the operator and as an onlooker see it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_e2e::config::StartedWith;
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{Agent, AgentConfig, ApiServer, PATIENCE, World, wait_until};
use serde_json::{Value, json};

use crate::objects::{api, install_definitions, object};
use crate::rights::{allow, install_policy};

/// Time for something to be seen, done and told: a status is written a second after the one before at the earliest.
pub(crate) const TOLD_WITHIN: Duration = Duration::from_secs(60);

/// Who agents are.
pub(crate) const AGENT: PodAccount<'_> = PodAccount { namespace: "reprise-agents", name: "reprise-agent" };

/// What an agent may do, of which the policy leaves it its own node's.
const VERBS: [&str; 4] = ["get", "list", "watch", "patch"];

/// Definitions, rights and the policy, as the chart installs them.
pub(crate) fn install(server: &ApiServer) {
    install_definitions(server);
    install_policy(server);
    allow(server, AGENT, &VERBS);
    let admin = api(&server.admin(), "CacheNode", "");
    let probe = object("CacheNode", "probe", &json!({ "nodeName": "probe" }));
    let applied = Patch::Apply(&probe);
    let written =
        server.block_on(admin.patch("probe", &PatchParams::apply(OPERATOR_FIELD_MANAGER), &applied));
    written.expect("nobody else has it");
    let stranger = api(&server.client_on_node(AGENT, "elsewhere"), "CacheNode", "");
    let change = Patch::Merge(json!({ "status": { "observedGeneration": 1 } }));
    wait_until("the policy is in effect", PATIENCE, || {
        let refused =
            server.block_on(stranger.patch_status("probe", &PatchParams::default(), &change)).err()?;
        refused.to_string().contains("reprise-confine-agents").then_some(())
    });
}

/// See the module. In the order in which it ends: the agent, then its folder.
pub(crate) struct Node<'a> {
    pub(crate) agent: Agent,
    pub(crate) world: World,
    server: &'a ApiServer,
    objects: Api<DynamicObject>,
    name: String,
}

/// What an agent is to be started with.
pub(crate) struct Setup<'a> {
    /// Name of the node.
    pub(crate) name: &'a str,
    /// Whose token it has; usually the same.
    pub(crate) token_of: &'a str,
    /// Members of the control plane.
    pub(crate) control_plane: Vec<String>,
    /// A command that becomes the agent's, in front of it.
    pub(crate) launcher: Vec<String>,
    /// What its pod tells it besides.
    pub(crate) environment: Vec<(String, String)>,
}

impl<'a> Setup<'a> {
    /// The usual agent of a node.
    pub(crate) fn of(name: &'a str) -> Setup<'a> {
        Setup {
            name,
            token_of: name,
            control_plane: Vec::new(),
            launcher: Vec::new(),
            environment: Vec::new(),
        }
    }
}

impl<'a> Node<'a> {
    /// Starts the agent of a node that nothing is wanted of yet.
    pub(crate) fn start(server: &'a ApiServer, name: &'a str) -> Node<'a> {
        let node = Node::launch(server, World::new(), &Setup::of(name));
        node.want(json!({}));
        node.wait_ready();
        node
    }

    /// Starts an agent without waiting for anything, and without an object.
    pub(crate) fn launch(server: &'a ApiServer, world: World, setup: &Setup<'_>) -> Node<'a> {
        let name = setup.name;
        let state = world.folder().join(format!("{name}-state"));
        let kubeconfig = world.folder().join(format!("{name}.kubeconfig"));
        server.kubeconfig_on_node(AGENT, setup.token_of, &kubeconfig);
        let root = world.folder().join(format!("{name}-root"));
        std::fs::create_dir_all(root.join("dev/disk/by-id")).expect("a folder");
        let config = AgentConfig {
            pool: None,
            control_plane: setup.control_plane.clone(),
            extra: format!(
                "[kubernetes]\nstate_directory = \"{}\"\nstatus_every = \"1s\"\n",
                state.display()
            ),
            ..AgentConfig::named(name)
        };
        let text = |path: &Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
        let start = StartedWith {
            launcher: setup.launcher.clone(),
            arguments: vec![
                "--in-cluster".to_owned(),
                "--kubeconfig".to_owned(),
                text(&kubeconfig),
                "--node-root".to_owned(),
                text(&root),
            ],
            environment: [("NODE_NAME", name), ("POD_IP", "127.0.0.1"), ("POD_NAME", "reprise-agent-x")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into_iter()
                .chain(setup.environment.clone())
                .collect(),
        };
        let agent = world.agent_with(&config, start);
        let objects = api(&server.admin(), "CacheNode", "");
        Node { agent, world, server, objects, name: name.to_owned() }
    }

    /// A node whose agent runs already.
    pub(crate) fn again(server: &'a ApiServer, world: World, agent: Agent, name: &str) -> Node<'a> {
        let objects = api(&server.admin(), "CacheNode", "");
        Node { agent, world, server, objects, name: name.to_owned() }
    }

    /// Where the node's root directory is for its agent. Files of pools, as claims name them, are below it.
    pub(crate) fn root(&self) -> PathBuf {
        self.world.folder().join(format!("{}-root", self.name))
    }

    /// A blank device with a stable name; gives the device.
    pub(crate) fn add_device(&self, name: &str, start: &[u8]) -> PathBuf {
        let device = self.root().join("dev").join(format!("{name}-device"));
        let mut content = start.to_vec();
        content.resize(DEVICE_BYTES, 0);
        std::fs::write(&device, content).expect("a device can be made");
        self.link_device(name);
        device
    }

    /// Gives a device its stable name.
    pub(crate) fn link_device(&self, name: &str) {
        let link = self.stable_name(name);
        std::os::unix::fs::symlink(format!("../../{name}-device"), link).expect("a link can be made");
    }

    /// Takes a device's stable name away, as when it is unplugged.
    pub(crate) fn unlink_device(&self, name: &str) {
        std::fs::remove_file(self.stable_name(name)).expect("the link is there");
    }

    fn stable_name(&self, name: &str) -> PathBuf {
        self.root().join("dev/disk/by-id").join(name)
    }

    /// Writes a spec, as the operator does; gives its generation.
    pub(crate) fn want(&self, mut spec: Value) -> i64 {
        spec["nodeName"] = json!(self.name);
        let wanted = object("CacheNode", &self.name, &spec);
        let operator = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let written = self.server.block_on(self.objects.patch(&self.name, &operator, &Patch::Apply(&wanted)));
        let written = written.unwrap_or_else(|error| panic!("{wanted} is not taken: {error}"));
        written.metadata.generation.expect("a generation")
    }

    /// Writes a spec and waits until the node says that it is in effect; gives the status.
    pub(crate) fn bring(&self, what: &str, spec: Value, holds: impl Fn(&Value) -> bool) -> Value {
        let generation = self.want(spec);
        self.wait_status(what, |status| status["observedGeneration"] == generation && holds(status))
    }

    /// The status, as anybody sees it.
    pub(crate) fn status(&self) -> Value {
        let stored = self.server.block_on(self.objects.get(&self.name)).expect("the object is there");
        stored.data["status"].clone()
    }

    /// Waits for a status.
    pub(crate) fn wait_status(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until(what, TOLD_WITHIN, || {
                std::thread::sleep(LOOK_EVERY);
                last = self.status();
                holds(&last).then(|| last.clone())
            })
        }));
        waited.unwrap_or_else(|_| panic!("{what}: the status stays {last:#}"))
    }

    /// Waits until the agent has done what its first spec wants.
    pub(crate) fn wait_ready(&self) {
        wait_until("the agent is ready", TOLD_WITHIN, || self.is_ready().then_some(()));
    }

    /// Whether the agent says so.
    pub(crate) fn is_ready(&self) -> bool {
        self.agent.admin().get("/readyz").expect("an answer").0 == 200
    }
}

/// Of the API server's time: a look is a request.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Bytes of a device.
pub(crate) const DEVICE_BYTES: usize = 64 << 20;

/// A claim of one file.
pub(crate) fn file_claim(pool: &str) -> Value {
    json!({
        "pool": pool, "uid": format!("uid-of-{pool}"), "generation": 1, "file": format!("/{pool}-file"), "size": "64Mi",
        "engine": "Plain",
    })
}

/// A claim of devices.
pub(crate) fn device_claim(pool: &str, glob: &str) -> Value {
    json!({
        "pool": pool, "uid": format!("uid-of-{pool}"), "generation": 1,
        "globs": [format!("/dev/disk/by-id/{glob}")], "engine": "Plain",
    })
}

/// The state of a device by the end of its path.
pub(crate) fn state<'a>(status: &'a Value, path: &str) -> Option<&'a str> {
    device(status, path)?["state"].as_str()
}

/// A device by the end of its path.
pub(crate) fn device<'a>(status: &'a Value, path: &str) -> Option<&'a Value> {
    let devices = status["devices"].as_array()?;
    devices.iter().find(|device| device["path"].as_str().is_some_and(|known| known.ends_with(path)))
}

/// Status and reason of a condition.
pub(crate) fn condition<'a>(status: &'a Value, kind: &str) -> (&'a str, &'a str) {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    let field = |name: &str| found.and_then(|condition| condition[name].as_str()).unwrap_or_default();
    (field("status"), field("reason"))
}

/// What a condition says.
pub(crate) fn words<'a>(status: &'a Value, kind: &str) -> &'a str {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    found.and_then(|condition| condition["message"].as_str()).unwrap_or_default()
}
