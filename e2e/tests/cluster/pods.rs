//! Nodes, and pods on them.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use reprise_e2e::kubernetes::{Cluster, Image, programs};
use reprise_e2e::wait_until;
use serde_json::Value;

/// Where pods of these tests serve.
pub(crate) const PORT: u16 = 8080;

/// From `apply` to a pod that answers, on a machine that is busy.
const PODS_WITHIN: Duration = Duration::from_secs(120);

/// One request.
const REQUEST_WITHIN: Duration = Duration::from_secs(3);

/// A pod on each node, and a service in front of them.
const SERVERS: &str = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: server }
spec:
  selector: { matchLabels: { app: server } }
  template:
    metadata: { labels: { app: server } }
    spec:
      terminationGracePeriodSeconds: 0
      securityContext: { runAsNonRoot: true, seccompProfile: { type: RuntimeDefault } }
      containers:
        - name: server
          image: localhost/reprise-e2e/made-here:1
          imagePullPolicy: Never
          args: [serve, "8080"]
          securityContext:
            readOnlyRootFilesystem: true
            allowPrivilegeEscalation: false
            capabilities: { drop: [ALL] }
          resources: { limits: { cpu: 200m, memory: 64Mi } }
          volumeMounts: [{ name: of-the-node, mountPath: /of-the-node, readOnly: true }]
          env:
            - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
            - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
      volumes:
        - { name: of-the-node, hostPath: { path: /var/lib/reprise/test, type: DirectoryOrCreate } }
---
apiVersion: v1
kind: Service
metadata: { name: server }
spec:
  selector: { app: server }
  ports: [{ port: 80, targetPort: 8080 }]
"#;

/// A pod of the daemon set.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    /// Its name.
    pub(crate) name: String,
    /// The node that it is on.
    pub(crate) node: String,
    /// Its address.
    pub(crate) address: String,
}

/// The servers that are ready, by node; they are there from now on.
pub(crate) fn servers(cluster: &Cluster) -> [Server; 2] {
    if cluster.try_kubectl(&["get", "daemonset", "server"]).is_err() {
        let archive = cluster.folder().join("made-here.tar");
        let files = [("/bin/made-here", programs::pod())];
        Image { name: "localhost/reprise-e2e/made-here:1", entrypoint: &["/bin/made-here"], files: &files }
            .write(&archive);
        cluster.import_image(&archive);
        fs::remove_file(archive).expect("a file of one's own can be removed");
        cluster.apply(SERVERS);
    }
    wait_until("a server on each node", PODS_WITHIN, || ready_servers(cluster).try_into().ok())
}

/// The servers that are ready, by node.
pub(crate) fn ready_servers(cluster: &Cluster) -> Vec<Server> {
    let said = cluster.kubectl(&["get", "pods", "--selector=app=server", "--output=json"]);
    let list: Value = serde_json::from_str(&said).expect("kubectl says JSON");
    let pods = list["items"].as_array().expect("a list has items");
    let is_ready = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        pod["metadata"]["deletionTimestamp"].is_null() && conditions.into_iter().any(ready)
    };
    let text = |value: &Value| value.as_str().expect("a ready pod has it").to_owned();
    let server = |pod: &Value| Server {
        name: text(&pod["metadata"]["name"]),
        node: text(&pod["spec"]["nodeName"]),
        address: text(&pod["status"]["podIP"]),
    };
    let mut servers: Vec<Server> = pods.iter().filter(is_ready).map(server).collect();
    servers.sort_by(|one, other| one.node.cmp(&other.node));
    servers
}

impl Server {
    /// Asks it, from the hub, as what stands on the same network.
    pub(crate) fn ask(&self, path: &str) -> Result<String, String> {
        let ask = || -> std::io::Result<String> {
            let address = format!("{}:{PORT}", self.address).parse().expect("an address");
            let mut stream = TcpStream::connect_timeout(&address, REQUEST_WITHIN)?;
            stream.set_read_timeout(Some(REQUEST_WITHIN))?;
            write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = ask().map_err(|error| error.to_string())?;
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if head.contains(" 200 ") => Ok(body.to_owned()),
            _ => Err(answer),
        }
    }

    /// Has it ask there.
    pub(crate) fn via(&self, place: &str) -> Result<String, String> {
        self.ask(&format!("/via/{place}"))
    }

    /// What it says of itself.
    pub(crate) fn introduction(&self) -> String {
        format!("{} on {}\n", self.name, self.node)
    }
}

pub(crate) fn nodes_say_what_they_are(cluster: &mut Cluster) {
    let said = cluster.kubectl(&["get", "nodes", "--output=json"]);
    let list: Value = serde_json::from_str(&said).expect("kubectl says JSON");
    let nodes = list["items"].as_array().expect("a list has items");
    assert_eq!(nodes.len(), cluster.nodes().len());
    for (node, own) in nodes.iter().zip(cluster.nodes()) {
        assert_eq!(node["metadata"]["name"], own.name());
        let addresses = node["status"]["addresses"].as_array().expect("a ready node has addresses");
        let internal = addresses.iter().find(|address| address["type"] == "InternalIP");
        assert_eq!(internal.expect("as it was told")["address"], own.address().to_string());
        let info = &node["status"]["nodeInfo"];
        for (field, begins) in [("kubeletVersion", "v1.36."), ("containerRuntimeVersion", "containerd://")] {
            assert!(info[field].as_str().is_some_and(|text| text.starts_with(begins)), "{field}: {info}");
        }
        assert!(cluster.is_ready(own));
    }
    assert_eq!(cluster.helm(&["list", "--all-namespaces", "--output=json"]).as_deref(), Ok("[]\n"));
    let refused = cluster.helm(&["install", "nothing", "no-such-chart"]).expect_err("there is no such chart");
    assert!(refused.contains("no-such-chart"), "{refused}");
}

pub(crate) fn run_on_each_node(cluster: &mut Cluster) {
    let servers = servers(cluster);
    for (server, node) in servers.iter().zip(cluster.nodes()) {
        assert_eq!(server.node, node.name());
        assert_eq!(server.ask("/").as_deref(), Ok(server.introduction().as_str()));
        assert_eq!(cluster.kubectl(&["logs", &server.name]), "serving on 8080\n");
        let itself = format!("localhost:{PORT}");
        let said = cluster.kubectl(&["exec", &server.name, "--", "/bin/made-here", "get", &itself]);
        assert_eq!(said, server.introduction());
        assert!(node.root().join("var/lib/reprise/test").is_dir(), "a folder of the node was made");
    }
    let [first, second] = servers.map(|server| cgroup_limit(cluster, &server));
    assert_eq!(first, 64 << 20, "its control group has the pod's limit");
    assert_eq!(second, first);
}

/// Bytes of memory that the control group of a server's pod allows.
fn cgroup_limit(cluster: &Cluster, server: &Server) -> u64 {
    let id = cluster.kubectl(&["get", "pod", &server.name, "--output=jsonpath={.metadata.uid}"]);
    let file = |name: &str| format!("/sys/fs/cgroup/*/pod{id}/{name}");
    let node = cluster.nodes().iter().find(|node| node.name() == server.node).expect("one of them");
    let mut command = node.command("find");
    // Version 1 and version 2.
    command.args([
        "/sys/fs/cgroup",
        "-path",
        &file("memory.limit_in_bytes"),
        "-o",
        "-path",
        &file("memory.max"),
    ]);
    let output = command.output().expect("findutils are there");
    let said = String::from_utf8_lossy(&output.stdout);
    let found = said.lines().next().unwrap_or_else(|| panic!("no control group of {server:?}"));
    let limit = fs::read_to_string(found).expect("control groups are the same on every node");
    limit.trim().parse().unwrap_or_else(|_| panic!("'{limit}' is a number of bytes"))
}

pub(crate) fn reach_each_other(cluster: &mut Cluster) {
    let [first, second] = servers(cluster);
    assert_eq!(first.via(&format!("{}:{PORT}", second.address)), Ok(second.introduction()));
    assert_eq!(second.via(&format!("{}:{PORT}", first.address)), Ok(first.introduction()));
    let service = cluster.kubectl(&["get", "service", "server", "--output=jsonpath={.spec.clusterIP}"]);
    for place in [service.as_str(), "server", "server.default.svc.cluster.local"] {
        for asking in [&first, &second] {
            // A node's kube-proxy hears of pods after they are ready. From then on every request arrives.
            wait_until(&format!("{place} to lead somewhere"), PODS_WITHIN, || {
                asking.via(&format!("{place}:80")).ok()
            });
            let mut heard: Vec<String> = Vec::new();
            // Every request is given to either by chance: both are heard after some, and nobody else.
            wait_until(&format!("both behind {place}"), PODS_WITHIN, || {
                let said = asking.via(&format!("{place}:80"));
                heard.push(said.unwrap_or_else(|error| panic!("{asking:?} asks {place}: {error}")));
                heard.sort();
                heard.dedup();
                (heard.len() == 2).then_some(())
            });
            assert_eq!(heard, both(&first, &second));
        }
    }
    let unknown = first.via("nobody.default.svc.cluster.local:80").expect_err("no such service");
    assert!(unknown.contains("lookup"), "{unknown}");
    // The API server behind its service's address: it speaks TLS only, and says so. It has not read all that it was sent, so what it says may be
    // lost with the reset of its connection.
    wait_until("the API server's answer", PODS_WITHIN, || {
        let said = first.via("kubernetes.default.svc:443").expect_err("it is no such server");
        assert!(said.contains("HTTPS") || said.contains("reset"), "{said}");
        said.contains("HTTPS").then_some(())
    });
}

fn both(first: &Server, second: &Server) -> Vec<String> {
    let mut both = vec![first.introduction(), second.introduction()];
    both.sort();
    both
}
