//! A node with its agent, and its `CacheNode` as the operator and other clients see it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::process::LaunchOptions;
use reprise_e2e::{Agent, AgentConfig, ApiServer, PATIENCE, TestEnv, wait_until};
use serde_json::{Value, json};

use crate::resources::objects::{api, install_definitions, object};
use crate::resources::rights::{allow, install_policy};

/// Bound until a change of the spec is applied and reported. A status is written at most once a second.
pub(crate) const REPORTED_WITHIN: Duration = Duration::from_secs(60);

/// Service account of the agents.
pub(crate) const AGENT: PodAccount<'_> = PodAccount { namespace: "reprise-agents", name: "reprise-agent" };

/// Verbs granted to agents; the admission policy restricts them to their own node.
const VERBS: [&str; 4] = ["get", "list", "watch", "patch"];

/// Installs the definitions, the roles and the admission policy, as the chart does.
pub(crate) fn install(server: &ApiServer) {
    install_definitions(server);
    install_policy(server);
    allow(server, AGENT, &VERBS);
    let admin = api(&server.admin(), "CacheNode", "");
    let probe = object("CacheNode", "probe", &json!({ "nodeName": "probe" }));
    let applied = Patch::Apply(&probe);
    let written =
        server.block_on(admin.patch("probe", &PatchParams::apply(OPERATOR_FIELD_MANAGER), &applied));
    written.expect("no other manager owns the object");
    let stranger = api(&server.client_on_node(AGENT, "elsewhere"), "CacheNode", "");
    let change = Patch::Merge(json!({ "status": { "observedGeneration": 1 } }));
    wait_until("the policy is in effect", PATIENCE, || {
        let refused =
            server.block_on(stranger.patch_status("probe", &PatchParams::default(), &change)).err()?;
        refused.to_string().contains("reprise-confine-agents").then_some(())
    });
}

/// A node with its agent. The fields are dropped in this order: the agent, then its folder.
pub(crate) struct Node<'a> {
    pub(crate) agent: Agent,
    pub(crate) env: TestEnv,
    server: &'a ApiServer,
    objects: Api<DynamicObject>,
    name: String,
}

/// Parameters of an agent's start.
pub(crate) struct Setup<'a> {
    /// Name of the node.
    pub(crate) name: &'a str,
    /// The node whose token the agent gets; normally the same.
    pub(crate) token_of: &'a str,
    /// Members of the control plane, `host:port`.
    pub(crate) control_plane: Vec<String>,
    /// Further lines of its configuration file.
    pub(crate) extra: String,
    /// Folder with certificates of the agent; `None`: plain connections.
    pub(crate) tls: Option<std::path::PathBuf>,
    /// A command that executes the agent, put in front of it.
    pub(crate) launcher: Vec<String>,
    /// Further environment variables of its pod.
    pub(crate) environment: Vec<(String, String)>,
}

impl<'a> Setup<'a> {
    /// Returns the default setup of a node.
    pub(crate) fn of(name: &'a str) -> Setup<'a> {
        Setup {
            name,
            token_of: name,
            control_plane: Vec::new(),
            extra: String::new(),
            tls: None,
            launcher: Vec::new(),
            environment: Vec::new(),
        }
    }
}

impl<'a> Node<'a> {
    /// Starts an agent with an empty spec, and waits until it is ready.
    pub(crate) fn start(server: &'a ApiServer, name: &'a str) -> Node<'a> {
        let node = Node::launch(server, TestEnv::new(), &Setup::of(name));
        node.apply_spec(json!({}));
        node.wait_ready();
        node
    }

    /// Starts an agent without a `CacheNode`, and waits until its process is ready.
    pub(crate) fn launch(server: &'a ApiServer, env: TestEnv, setup: &Setup<'_>) -> Node<'a> {
        let name = setup.name;
        let state = env.folder().join(format!("{name}-state"));
        let kubeconfig = env.folder().join(format!("{name}.kubeconfig"));
        server.kubeconfig_on_node(AGENT, setup.token_of, &kubeconfig);
        let root = env.folder().join(format!("{name}-root"));
        std::fs::create_dir_all(root.join("dev/disk/by-id")).expect("a folder");
        let config = AgentConfig {
            pool: None,
            control_plane: setup.control_plane.clone(),
            tls: setup.tls.clone(),
            extra: format!(
                "{}[kubernetes]\nstate_directory = \"{}\"\nstatus_every = \"1s\"\n",
                setup.extra,
                state.display()
            ),
            ..AgentConfig::named(name)
        };
        let text = |path: &Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
        let start = LaunchOptions {
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
        let agent = env.agent_with(&config, start);
        let objects = api(&server.admin(), "CacheNode", "");
        Node { agent, env, server, objects, name: name.to_owned() }
    }

    /// Returns a node for an agent that runs already.
    pub(crate) fn with_running_agent(
        server: &'a ApiServer,
        env: TestEnv,
        agent: Agent,
        name: &str,
    ) -> Node<'a> {
        let objects = api(&server.admin(), "CacheNode", "");
        Node { agent, env, server, objects, name: name.to_owned() }
    }

    /// Returns the folder that the agent sees as the node's root. Pool files are below it at the claimed
    /// paths.
    pub(crate) fn root(&self) -> PathBuf {
        self.env.folder().join(format!("{}-root", self.name))
    }

    /// Creates a device that begins with `start`, and gives it a stable name. Returns its path.
    pub(crate) fn add_device(&self, name: &str, start: &[u8]) -> PathBuf {
        let device = self.root().join("dev").join(format!("{name}-device"));
        let mut content = start.to_vec();
        content.resize(DEVICE_BYTES, 0);
        std::fs::write(&device, content).expect("a device can be created");
        self.link_device(name);
        device
    }

    /// Creates the stable name of a device.
    pub(crate) fn link_device(&self, name: &str) {
        let link = self.stable_name(name);
        std::os::unix::fs::symlink(format!("../../{name}-device"), link).expect("a link can be created");
    }

    /// Removes the stable name of a device, as when it is unplugged.
    pub(crate) fn unlink_device(&self, name: &str) {
        std::fs::remove_file(self.stable_name(name)).expect("the link exists");
    }

    fn stable_name(&self, name: &str) -> PathBuf {
        self.root().join("dev/disk/by-id").join(name)
    }

    /// Writes a spec as the operator does. Returns its generation.
    pub(crate) fn apply_spec(&self, mut spec: Value) -> i64 {
        spec["nodeName"] = json!(self.name);
        let desired = object("CacheNode", &self.name, &spec);
        let operator = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let written =
            self.server.block_on(self.objects.patch(&self.name, &operator, &Patch::Apply(&desired)));
        let written = written.unwrap_or_else(|error| panic!("cannot apply {desired}: {error}"));
        written.metadata.generation.expect("a generation")
    }

    /// Writes a spec, and waits until the status has its generation and satisfies `holds`. Returns the
    /// status.
    pub(crate) fn apply_and_wait(&self, what: &str, spec: Value, holds: impl Fn(&Value) -> bool) -> Value {
        let generation = self.apply_spec(spec);
        self.wait_status(what, |status| status["observedGeneration"] == generation && holds(status))
    }

    /// Claims a file as pool `p1`, and waits until it is open. Returns the spec.
    pub(crate) fn open_pool(&self) -> Value {
        let claims = json!({ "claims": [file_claim("p1")] });
        self.apply_and_wait("the pool is open", claims.clone(), has_state("/p1-file", "Open"));
        claims
    }

    /// Returns the current status of the `CacheNode`.
    pub(crate) fn status(&self) -> Value {
        let stored = self.server.block_on(self.objects.get(&self.name)).expect("the object exists");
        stored.data["status"].clone()
    }

    /// Waits until the status satisfies `holds`, and returns it.
    pub(crate) fn wait_status(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until(what, REPORTED_WITHIN, || {
                last = self.status();
                holds(&last).then(|| last.clone())
            })
        }));
        waited.unwrap_or_else(|_| panic!("{what}: the status stays {last:#}"))
    }

    /// Waits until the agent has applied its first spec.
    pub(crate) fn wait_ready(&self) {
        wait_until("the agent is ready", REPORTED_WITHIN, || self.is_ready().then_some(()));
    }

    /// Returns whether `/readyz` of the agent succeeds.
    pub(crate) fn is_ready(&self) -> bool {
        self.agent.admin().get("/readyz").expect("a response").0 == 200
    }
}

/// Size of a device in bytes.
pub(crate) const DEVICE_BYTES: usize = 64 << 20;

/// Returns a claim of one file.
pub(crate) fn file_claim(pool: &str) -> Value {
    json!({
        "pool": pool, "uid": format!("uid-of-{pool}"), "generation": 1, "file": format!("/{pool}-file"), "size": "64Mi",
        "engine": "Plain",
    })
}

/// Returns a claim of devices.
pub(crate) fn device_claim(pool: &str, glob: &str) -> Value {
    json!({
        "pool": pool, "uid": format!("uid-of-{pool}"), "generation": 1,
        "globs": [format!("/dev/disk/by-id/{glob}")], "engine": "Plain",
    })
}

/// Returns the state of the device whose path ends with `path`.
pub(crate) fn state<'a>(status: &'a Value, path: &str) -> Option<&'a str> {
    device(status, path)?["state"].as_str()
}

/// Returns a predicate: the device whose path ends with `path` has this state.
pub(crate) fn has_state(path: &str, wanted: &str) -> impl Fn(&Value) -> bool {
    move |status| state(status, path) == Some(wanted)
}

/// Returns the device whose path ends with `path`.
pub(crate) fn device<'a>(status: &'a Value, path: &str) -> Option<&'a Value> {
    let devices = status["devices"].as_array()?;
    devices.iter().find(|device| device["path"].as_str().is_some_and(|known| known.ends_with(path)))
}

/// Returns the status and the reason of a condition; empty if it does not exist.
pub(crate) fn condition<'a>(status: &'a Value, kind: &str) -> (&'a str, &'a str) {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    let field = |name: &str| found.and_then(|condition| condition[name].as_str()).unwrap_or_default();
    (field("status"), field("reason"))
}

/// Returns the message of a condition; empty if it does not exist.
pub(crate) fn condition_message<'a>(status: &'a Value, kind: &str) -> &'a str {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    found.and_then(|condition| condition["message"].as_str()).unwrap_or_default()
}
