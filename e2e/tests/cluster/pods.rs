//! Nodes of the cluster, and pods on them.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use reprise_e2e::kubernetes::{Cluster, Image, programs};
use reprise_e2e::wait_until;
use serde_json::Value;

/// Port of the server pods.
pub(crate) const PORT: u16 = 8080;

/// Bound from `apply` until a pod responds, on a busy machine.
const PODS_WITHIN: Duration = Duration::from_secs(120);

/// Bound on one request.
const REQUEST_WITHIN: Duration = Duration::from_secs(3);

/// A server pod on each node, and a service in front of them.
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
          image: localhost/reprise-e2e/built-by-test:1
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

/// A server pod of the DaemonSet.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    /// Name of the pod.
    pub(crate) name: String,
    /// Node of the pod.
    pub(crate) node: String,
    /// IP address of the pod.
    pub(crate) address: String,
}

/// Returns the ready servers by node. Creates the DaemonSet if it does not exist.
pub(crate) fn servers(cluster: &Cluster) -> [Server; 2] {
    if cluster.try_kubectl(&["get", "daemonset", "server"]).is_err() {
        let archive = cluster.folder().join("built-by-test.tar");
        let files = [("/bin/built-by-test", programs::pod())];
        Image {
            name: "localhost/reprise-e2e/built-by-test:1",
            entrypoint: &["/bin/built-by-test"],
            files: &files,
        }
        .write(&archive);
        cluster.import_image(&archive);
        fs::remove_file(archive).expect("the archive can be removed");
        cluster.apply(SERVERS);
    }
    wait_until("a server on each node", PODS_WITHIN, || ready_servers(cluster).try_into().ok())
}

/// Returns the ready servers by node.
pub(crate) fn ready_servers(cluster: &Cluster) -> Vec<Server> {
    let json = cluster.kubectl(&["get", "pods", "--selector=app=server", "--output=json"]);
    let list: Value = serde_json::from_str(&json).expect("kubectl prints JSON");
    let pods = list["items"].as_array().expect("a list has items");
    let is_ready = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        pod["metadata"]["deletionTimestamp"].is_null() && conditions.into_iter().any(ready)
    };
    let text = |value: &Value| value.as_str().expect("a ready pod has this field").to_owned();
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
    /// Sends a request from the hub, which is on the same network.
    pub(crate) fn get(&self, path: &str) -> Result<String, String> {
        let get = || -> std::io::Result<String> {
            let address = format!("{}:{PORT}", self.address).parse().expect("an address");
            let mut stream = TcpStream::connect_timeout(&address, REQUEST_WITHIN)?;
            stream.set_read_timeout(Some(REQUEST_WITHIN))?;
            write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
            let mut response = String::new();
            stream.read_to_string(&mut response)?;
            Ok(response)
        };
        let response = get().map_err(|error| error.to_string())?;
        match response.split_once("\r\n\r\n") {
            Some((head, body)) if head.contains(" 200 ") => Ok(body.to_owned()),
            _ => Err(response),
        }
    }

    /// Makes the server send a request to a place, and returns the response.
    pub(crate) fn via(&self, place: &str) -> Result<String, String> {
        self.get(&format!("/via/{place}"))
    }

    /// Returns the expected response to `GET /`.
    pub(crate) fn introduction(&self) -> String {
        format!("{} on {}\n", self.name, self.node)
    }
}

pub(crate) fn nodes_report_their_versions(cluster: &mut Cluster) {
    let json = cluster.kubectl(&["get", "nodes", "--output=json"]);
    let list: Value = serde_json::from_str(&json).expect("kubectl prints JSON");
    let nodes = list["items"].as_array().expect("a list has items");
    assert_eq!(nodes.len(), cluster.nodes().len());
    for (node, own) in nodes.iter().zip(cluster.nodes()) {
        assert_eq!(node["metadata"]["name"], own.name());
        let addresses = node["status"]["addresses"].as_array().expect("a ready node has addresses");
        let internal = addresses.iter().find(|address| address["type"] == "InternalIP");
        assert_eq!(internal.expect("the node's address")["address"], own.address().to_string());
        let info = &node["status"]["nodeInfo"];
        for (field, begins) in [("kubeletVersion", "v1.36."), ("containerRuntimeVersion", "containerd://")] {
            assert!(info[field].as_str().is_some_and(|text| text.starts_with(begins)), "{field}: {info}");
        }
        assert!(cluster.is_ready(own));
    }
    assert_eq!(cluster.helm(&["list", "--all-namespaces", "--output=json"]).as_deref(), Ok("[]\n"));
    let refused =
        cluster.helm(&["install", "nothing", "no-such-chart"]).expect_err("the chart does not exist");
    assert!(refused.contains("no-such-chart"), "{refused}");
}

pub(crate) fn run_on_each_node(cluster: &mut Cluster) {
    let servers = servers(cluster);
    for (server, node) in servers.iter().zip(cluster.nodes()) {
        assert_eq!(server.node, node.name());
        assert_eq!(server.get("/").as_deref(), Ok(server.introduction().as_str()));
        assert_eq!(cluster.kubectl(&["logs", &server.name]), "serving on 8080\n");
        let own_address = format!("localhost:{PORT}");
        let response =
            cluster.kubectl(&["exec", &server.name, "--", "/bin/built-by-test", "get", &own_address]);
        assert_eq!(response, server.introduction());
        assert!(
            node.root().join("var/lib/reprise/test").is_dir(),
            "the hostPath folder was created on the node"
        );
    }
    let [first, second] = servers.map(|server| cgroup_limit(cluster, &server));
    assert_eq!(first, 64 << 20, "the control group has the pod's limit");
    assert_eq!(second, first);
}

/// Returns the memory limit of the control group of a server's pod, in bytes.
fn cgroup_limit(cluster: &Cluster, server: &Server) -> u64 {
    let id = cluster.kubectl(&["get", "pod", &server.name, "--output=jsonpath={.metadata.uid}"]);
    let file = |name: &str| format!("/sys/fs/cgroup/*/pod{id}/{name}");
    let node = cluster.nodes().iter().find(|node| node.name() == server.node).expect("a node of the cluster");
    let mut command = node.command("find");
    // The files of version 1 and version 2.
    command.args([
        "/sys/fs/cgroup",
        "-path",
        &file("memory.limit_in_bytes"),
        "-o",
        "-path",
        &file("memory.max"),
    ]);
    let output = command.output().expect("find can be run");
    let files = String::from_utf8_lossy(&output.stdout);
    let found = files.lines().next().unwrap_or_else(|| panic!("no control group of {server:?}"));
    let limit = fs::read_to_string(found).expect("all nodes share /sys/fs/cgroup");
    limit.trim().parse().unwrap_or_else(|_| panic!("invalid limit '{limit}'"))
}

pub(crate) fn reach_each_other(cluster: &mut Cluster) {
    let [first, second] = servers(cluster);
    assert_eq!(first.via(&format!("{}:{PORT}", second.address)), Ok(second.introduction()));
    assert_eq!(second.via(&format!("{}:{PORT}", first.address)), Ok(first.introduction()));
    let service = cluster.kubectl(&["get", "service", "server", "--output=jsonpath={.spec.clusterIP}"]);
    for place in [service.as_str(), "server", "server.default.svc.cluster.local"] {
        for client in [&first, &second] {
            // kube-proxy learns of pods after they are ready. From then on, every request must arrive.
            wait_until(&format!("{place} to respond"), PODS_WITHIN, || {
                client.via(&format!("{place}:80")).ok()
            });
            let mut responses: Vec<String> = Vec::new();
            // Requests are distributed at random: after some of them, both servers have responded, and no
            // other.
            wait_until(&format!("both behind {place}"), PODS_WITHIN, || {
                let response = client.via(&format!("{place}:80"));
                responses.push(response.unwrap_or_else(|error| panic!("{client:?} to {place}: {error}")));
                responses.sort();
                responses.dedup();
                (responses.len() == 2).then_some(())
            });
            assert_eq!(responses, both(&first, &second));
        }
    }
    let unknown = first.via("unknown.default.svc.cluster.local:80").expect_err("the name does not exist");
    assert!(unknown.contains("lookup"), "{unknown}");
    // The API server accepts TLS only and responds to plain HTTP with an error. It does not read the whole
    // request, so a connection reset may discard that response.
    wait_until("the API server's response", PODS_WITHIN, || {
        let error = first.via("kubernetes.default.svc:443").expect_err("the server requires TLS");
        assert!(error.contains("HTTPS") || error.contains("reset"), "{error}");
        error.contains("HTTPS").then_some(())
    });
}

fn both(first: &Server, second: &Server) -> Vec<String> {
    let mut both = vec![first.introduction(), second.introduction()];
    both.sort();
    both
}
