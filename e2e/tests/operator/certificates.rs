//! Certificates of agents, members and people: requested through the API server, issued by the operator, followed by
//! processes without a restart. The operator has the rights of the chart.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Api, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use reprise_e2e::kubernetes::{PodAccount, User};
use reprise_e2e::process::binary;
use reprise_e2e::{ChildProcess, PATIENCE, wait_until};
use reprise_identity::credentials::Files;
use reprise_identity::{Authority, Credentials, Expected, Identity, NewRequest, Role};
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime};

use crate::operator::rights;
use crate::operator::test_cluster::{NAMESPACE, TestCluster};

/// The agents' account of cluster `c`.
const AGENT: PodAccount<'static> = PodAccount { namespace: NAMESPACE, name: "c-agent" };
/// The members' account of cluster `c`.
const MEMBER: PodAccount<'static> = PodAccount { namespace: NAMESPACE, name: "c-controlplane" };
/// The account of etcd of cluster `c`.
const ETCD: PodAccount<'static> = PodAccount { namespace: NAMESPACE, name: "c-etcd" };
/// An account of other pods in the same namespace.
const OTHER: PodAccount<'static> = PodAccount { namespace: NAMESPACE, name: "other" };
/// Node whose pods of [`MEMBER`] have the name of a member, `c-controlplane-0`. The same is true of [`ETCD`].
const MEMBER_NODE: &str = "0";

/// HTTP status of forbidden requests.
const FORBIDDEN: u16 = 403;

fn identity(role: &str) -> Identity {
    Identity::new("c.cache", role.parse().expect("a role")).expect("valid names")
}

/// Starts an operator with the chart's rights and a cluster with certificates.
fn start() -> (TestCluster, reprise_e2e::Operator) {
    let k8s = TestCluster::new();
    // Of certificates that a test issues for less than a third of the usual time.
    k8s.env.allow("the certificate ends soon");
    for role in ["reprise-agent", "reprise-member"] {
        rights::apply_cluster_role(&k8s, role);
    }
    let operator = rights::start_operator(&k8s, |_| ());
    k8s.cluster(json!({}));
    k8s.wait_condition("KVCacheCluster", "c", ["CertificatesReady", "True", "AsDesired"]);
    (k8s, operator)
}

/// Certificates of the trusted authorities, as the kubelet mounts them.
fn trusted(k8s: &TestCluster) -> String {
    let map = k8s.wait_for("ConfigMap", "c-authorities");
    map.data["data"]["ca.crt"].as_str().expect("PEM").to_owned()
}

fn authority(k8s: &TestCluster) -> Authority {
    let secret = k8s.wait_for("Secret", "c-ca");
    let text = |entry: &str| {
        let bytes: ByteString = serde_json::from_value(secret.data["data"][entry].clone()).expect("bytes");
        String::from_utf8(bytes.0).expect("PEM")
    };
    Authority::load(&text("tls.crt"), &text("tls.key")).expect("an authority")
}

/// Writes a certificate of an identity that is valid from 80 days ago, for 90 days, so its renewal is due.
fn write_due(k8s: &TestCluster, role: &str, folder: &Path) {
    let (authority, now) = (authority(k8s), OffsetDateTime::now_utc());
    let (from, until) = (now - Duration::days(80), now + Duration::days(10));
    let issued = authority.issue_between(&identity(role), from, until).expect("a valid period");
    let files = Files {
        authorities: authority.certificate().as_bytes().to_vec(),
        certificate: issued.certificate.into_bytes(),
        key: issued.key.into_bytes(),
    };
    fs::create_dir_all(folder).expect("the folder is writable");
    files.write(folder).expect("the folder is writable");
}

/// The sidecar of a pod, with its folders and log.
struct Sidecar {
    running: ChildProcess,
    folder: PathBuf,
    authorities: PathBuf,
}

impl Sidecar {
    /// Starts the sidecar of a pod on a node. It asks for `role`.
    fn start(k8s: &TestCluster, account: PodAccount<'_>, node: &str, role: &str, name: &str) -> Sidecar {
        let folder = k8s.env.folder().join(name);
        fs::create_dir_all(&folder).expect("the folder is writable");
        let in_folder = |file: &str| k8s.env.folder().join(format!("{name}.{file}"));
        let (kubeconfig, authorities) = (in_folder("kubeconfig"), in_folder("authorities"));
        k8s.server.kubeconfig_on_node(account, node, &kubeconfig);
        fs::write(&authorities, trusted(k8s)).expect("the folder is writable");
        let log = in_folder("log");
        k8s.env.watch_log(log.clone());
        let mut command = command(role, &folder, &authorities);
        command.env("KUBECONFIG", kubeconfig).stderr(File::create(log).expect("the folder is writable"));
        Sidecar { running: ChildProcess::spawn(command), folder, authorities }
    }

    /// Waits for a usable certificate other than `before`.
    fn wait(&mut self, before: Option<&Credentials>) -> Credentials {
        wait_until("a certificate", PATIENCE, || {
            assert!(self.running.is_alive(), "the sidecar of {} has ended", self.folder.display());
            let found = Credentials::read(&self.folder).ok()?;
            found.check_issuer().ok()?;
            before.is_none_or(|before| before.fingerprint != found.fingerprint).then_some(found)
        })
    }

    fn check(&self, role: &str) -> ExitStatus {
        let mut command = command(role, &self.folder, &self.authorities);
        command.arg("--check").output().expect("the program can be run").status
    }
}

fn command(role: &str, folder: &Path, authorities: &Path) -> Command {
    let mut command = Command::new(binary("reprise-operator"));
    command.arg("certificate").arg(format!("--identity={}", identity(role)));
    command.arg("--folder").arg(folder).arg("--authorities").arg(authorities);
    command
}

/// Creates a request and waits for its answer: the certificate, or the reason of the denial.
fn request(k8s: &TestCluster, client: &Client, role: &str) -> Result<String, String> {
    let new = NewRequest::create(&identity(role)).expect("valid");
    let spec = json!({
        "signerName": "reprise.dev/process", "usages": ["digital signature", "client auth"],
        "request": ByteString(new.request.into_bytes()),
    });
    let wanted = CertificateSigningRequest {
        metadata: ObjectMeta { generate_name: Some("test-".to_owned()), ..ObjectMeta::default() },
        spec: serde_json::from_value(spec).expect("a spec"),
        status: None,
    };
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let created = k8s.server.block_on(requests.create(&PostParams::default(), &wanted));
    let name = created.expect("the account may create requests").name_any();
    let requests: Api<CertificateSigningRequest> = Api::all(k8s.client());
    wait_until("an answer", PATIENCE, || {
        let status = k8s.server.block_on(requests.get(&name)).expect("it exists").status?;
        if let Some(certificate) = status.certificate {
            return Some(Ok(String::from_utf8(certificate.0).expect("PEM")));
        }
        let denied = status.conditions?.into_iter().find(|one| one.type_ == "Denied")?;
        Some(Err(denied.message.unwrap_or_default()))
    })
}

/// Grants a user a rule.
pub(crate) fn grant(k8s: &TestCluster, name: &str, user: &str, rule: &Value) {
    let (params, group) = (PatchParams::apply("test").force(), "rbac.authorization.k8s.io");
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": { "name": name }, "rules": [rule],
    });
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": { "name": name },
        "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
        "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
    });
    let roles: Api<ClusterRole> = Api::all(k8s.client());
    let bindings: Api<ClusterRoleBinding> = Api::all(k8s.client());
    k8s.server.block_on(async {
        roles.patch(name, &params, &Patch::Apply(&role)).await.expect("a role");
        bindings.patch(name, &params, &Patch::Apply(&binding)).await.expect("a binding");
    });
}

fn may_create_requests() -> Value {
    json!({ "apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"], "verbs": ["create"] })
}

#[test]
fn pods_get_certificates_of_their_own_node_and_no_other_identity() {
    let (k8s, _operator) = start();
    for words in ["denied a request for a certificate", "cannot get a certificate; retrying"] {
        k8s.env.require(words);
    }
    let mut agent = Sidecar::start(&k8s, AGENT, "n1", "agent/n1", "agent");
    let credentials = agent.wait(None);
    assert_eq!(credentials.identity, identity("agent/n1"));
    assert!(agent.check("agent/n1").success());
    assert!(!agent.check("agent/n2").success(), "the check is for its own identity");
    let mut member = Sidecar::start(&k8s, MEMBER, MEMBER_NODE, "member", "member");
    assert_eq!(member.wait(None).identity.role, Role::Member);

    // The same program asks for the identity of another node: its log states the reason, and it gets no files.
    let stranger = Sidecar::start(&k8s, AGENT, "n1", "agent/n2", "stranger");
    let log = k8s.env.folder().join("stranger.log");
    wait_until("the denial", PATIENCE, || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        text.contains("pod is on node n1, not on n2").then_some(())
    });
    assert!(!stranger.folder.join("tls.crt").exists());
    drop(stranger);

    for account in [OTHER, ETCD] {
        grant(&k8s, &format!("{}-requests", account.name), &account.user(), &may_create_requests());
    }
    let of = |account, node| k8s.server.client_on_node(account, node);
    request(&k8s, &of(ETCD, MEMBER_NODE), "etcd").expect("a pod of etcd");
    for (client, role, words) in [
        (of(OTHER, "n1"), "agent/n1", "not system:serviceaccount:cache:c-agent"),
        (of(OTHER, "n1"), "member", "not system:serviceaccount:cache:c-controlplane"),
        (of(AGENT, "n1"), "member", "not system:serviceaccount:cache:c-controlplane"),
        (of(AGENT, "n1"), "operator", "only the operator"),
        (of(AGENT, "n1"), "admin", "may not administer"),
        (of(MEMBER, "n1"), "member", "is not a member"),
        (of(MEMBER, MEMBER_NODE), "etcd", "not system:serviceaccount:cache:c-etcd"),
        (of(ETCD, MEMBER_NODE), "member", "not system:serviceaccount:cache:c-controlplane"),
        (of(ETCD, "n1"), "etcd", "is not a member"),
        (k8s.server.client_on_no_node(AGENT), "agent/n1", "use the token of a pod"),
    ] {
        let refused = request(&k8s, &client, role).expect_err(words);
        assert!(refused.contains(words), "{role}: {refused}");
    }

    // Agents read no Secrets, and do not find the requests of others.
    let client = of(AGENT, "n1");
    let code = |error: kube::Error| match error {
        kube::Error::Api(status) => status.code,
        other => panic!("{other}"),
    };
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(client, NAMESPACE);
    k8s.server.block_on(async {
        assert_eq!(code(requests.list(&ListParams::default()).await.expect_err("listed")), FORBIDDEN);
        assert_eq!(code(secrets.get("c-ca").await.expect_err("read")), FORBIDDEN);
        assert_eq!(code(secrets.list(&ListParams::default()).await.expect_err("listed")), FORBIDDEN);
    });
}

#[test]
fn member_follows_its_renewed_certificate_and_another_authority_without_a_restart() {
    let (k8s, _operator) = start();
    let folder = k8s.env.folder().join("member");
    write_due(&k8s, "member", &folder);
    let mut member = k8s.env.control_plane_with_tls(&folder);
    let admin_folder = k8s.env.folder().join("admin");
    write_due(&k8s, "admin", &admin_folder);
    let admin = member.admin().with_certificates(admin_folder.clone(), Expected::Role(Role::Member));
    let before = Credentials::read(&folder).expect("written");
    let tls = || admin.json("/status")["tls"].clone();
    assert_eq!(tls()["fingerprint"], before.fingerprint.to_string());

    let mut sidecar = Sidecar::start(&k8s, MEMBER, MEMBER_NODE, "member", "member");
    let renewed = sidecar.wait(Some(&before));
    assert!(!renewed.is_renewal_due(std::time::SystemTime::now()));
    wait_until("the member to use it", PATIENCE, || {
        (tls()["fingerprint"] == renewed.fingerprint.to_string()).then_some(())
    });

    // An administrator deletes the authority: the operator creates another one, and both are trusted.
    let first = trusted(&k8s);
    k8s.delete("Secret", "c-ca");
    let both = wait_until("another authority", PATIENCE, || {
        let both = trusted(&k8s);
        (both != first).then_some(both)
    });
    assert!(both.ends_with(first.trim_start()), "the authority before is trusted, and does not issue");
    fs::write(&sidecar.authorities, both).expect("the folder is writable");
    wait_until("the member to trust both", PATIENCE, || (tls()["authorities"] == 2).then_some(()));
    assert_eq!(tls()["fingerprint"], renewed.fingerprint.to_string(), "pods need time to trust both");
    write_due(&k8s, "admin", &admin_folder);
    // The member still has its certificate of the authority before.
    fs::write(admin_folder.join("ca.crt"), trusted(&k8s)).expect("the folder is writable");
    assert_eq!(tls()["authorities"], 2, "it accepts a certificate of the new authority");
    assert!(member.is_running() && tls()["reloads_refused"] == 0, "{}", tls());
    member.kill();
}

#[test]
fn people_need_a_permission_on_the_cluster_and_get_certificates_for_a_day() {
    let (k8s, _operator) = start();
    k8s.env.require("denied a request for a certificate");
    let jane = User { name: "jane", group: None };
    grant(&k8s, "jane-requests", "jane", &may_create_requests());
    let client = k8s.server.client(&jane);
    let refused = request(&k8s, &client, "admin").expect_err("no permission");
    assert!(refused.contains("jane may not administer") && refused.contains("bind a Role"), "{refused}");
    let rule =
        json!({ "apiGroups": ["reprise.dev"], "resources": ["kvcacheclusters"], "verbs": ["observe"] });
    grant(&k8s, "jane-observes", "jane", &rule);
    let certificate = wait_until("the permission", PATIENCE, || request(&k8s, &client, "console").ok());
    assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"));
    assert!(request(&k8s, &client, "admin").is_err(), "a console is not an admin");
}
