//! Certificates on bare metal, as an operator handles them: the commands are those of the section "Certificates" of
//! `docs/bare-metal.md`, run line by line, with real processes that use the files meanwhile.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use reprise_e2e::agent::command;
use reprise_e2e::process::binary;
use reprise_e2e::{
    Admin, AgentConfig, ChildProcess, PATIENCE, StartingProcess, TestEnv, control_plane, wait_until,
};
use reprise_identity::{Authority, Credentials, Expected, Role};
use serde_json::Value;
use time::{Duration, OffsetDateTime};

/// Exit code of an agent with an invalid configuration.
const CONFIGURATION: i32 = 1;

const DAY: f64 = 86_400.0;

/// The machine of an operator: the folder that the guide calls `/etc/reprise`.
struct Machine {
    folder: PathBuf,
    guide: String,
}

impl Machine {
    fn new(env: &TestEnv) -> Machine {
        let page =
            fs::read_to_string(reprise_e2e::tree().join("docs/bare-metal.md")).expect("the guide exists");
        let section = page.split("\n## ").find(|section| section.starts_with("Certificates\n"));
        let guide = section.expect("the guide has the section").to_owned();
        Machine { folder: env.folder().join("etc"), guide }
    }

    /// Runs a line of a shell with the guide's folder replaced.
    fn run(&self, line: &str) -> Output {
        let program = binary("reprise");
        let programs = program.parent().expect("programs are in a folder");
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").expect("a path"));
        let line = line.replace("/etc/reprise", &self.folder.display().to_string());
        Command::new("sh").args(["-c", &line]).env("PATH", path).output().expect("a shell")
    }

    /// Runs the guide's `reprise` commands that contain these words, and returns their output.
    fn follow_guide(&self, words: &str) -> String {
        let lines: Vec<&str> =
            self.guide.lines().filter(|line| line.starts_with("reprise ") && line.contains(words)).collect();
        assert!(!lines.is_empty(), "the guide has no command with '{words}'");
        let run = |line: &&str| {
            let output = self.run(line);
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).expect("output is UTF-8")
        };
        lines.iter().map(run).collect()
    }

    /// Runs a command that must fail, and returns its error.
    fn refusal(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success(), "{line} succeeds");
        String::from_utf8(output.stderr).expect("errors are UTF-8")
    }

    /// Renews all folders: the same line after each step.
    fn renew(&self) -> String {
        let line =
            self.guide.lines().find(|line| line.starts_with("reprise certs renew")).expect("in the guide");
        let output = self.run(line);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("output is UTF-8")
    }

    fn certs(&self, name: &str) -> PathBuf {
        self.folder.join("certs").join(name)
    }

    fn agent_config(&self, certs: &str, members: &[String]) -> AgentConfig {
        AgentConfig {
            pool: None,
            control_plane: members.to_vec(),
            tls: Some(self.certs(certs)),
            ..AgentConfig::named("node-1")
        }
    }

    /// Starts a member with its certificates. Returns its process, its gRPC address and its admin port.
    fn start_member(&self, env: &TestEnv) -> (ChildProcess, String, Admin) {
        let (config, log) = (env.folder().join("member.toml"), env.folder().join("member.log"));
        let text = format!(
            "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[store]\nkind = \"memory\"\n[tls]\nfolder = \"{}\"\n",
            self.certs("member-1").display()
        );
        fs::write(&config, text).expect("the folder is writable");
        env.watch_log(log.clone());
        let started = StartingProcess::spawn(control_plane::command(&config), &log).ready();
        let (process, ready) =
            started.unwrap_or_else(|refused| panic!("the member does not start: {refused:?}"));
        let address = |field: &str| ready[field].as_str().expect("the ready line names its ports").to_owned();
        let admin = Admin::at(&address("admin"));
        (process, address("grpc"), admin.with_certificates(self.certs("admin"), Expected::Role(Role::Member)))
    }
}

/// Returns a field of the certificates that a process reports.
fn tls(admin: &Admin, field: &str) -> Value {
    admin.json("/status")["tls"][field].clone()
}

fn days_left(admin: &Admin, metric: &str) -> f64 {
    admin.metric(metric, "") / DAY
}

/// Whether a process uses the certificate that is in a folder now.
fn is_used(admin: &Admin, folder: &Path) -> bool {
    let found = Credentials::read(folder).expect("valid files").fingerprint.to_string();
    tls(admin, "fingerprint") == found
}

/// Waits until all processes use the files of their folders.
pub(crate) fn wait_until_used(processes: &[(&Admin, PathBuf)]) {
    for (admin, folder) in processes {
        wait_until("the process uses the new files", PATIENCE, || is_used(admin, folder).then_some(()));
    }
}

/// Puts a certificate into a folder that has ten days left of ninety.
fn let_end_soon(machine: &Machine, folder: &Path) {
    let text = |name: &str| fs::read_to_string(machine.folder.join("authority").join(name)).expect("a file");
    let authority = Authority::load(&text("ca.crt"), &text("ca.key")).expect("an authority");
    let identity = Credentials::read(folder).expect("valid files").identity;
    let now = OffsetDateTime::now_utc();
    let issued = authority.issue_between(&identity, now - Duration::days(80), now + Duration::days(10));
    let issued = issued.expect("a certificate");
    fs::write(folder.join("tls.key"), issued.key).expect("own folder");
    fs::write(folder.join("tls.crt"), issued.certificate).expect("own folder");
}

#[test]
fn the_guides_steps_create_certificates_and_refuse_mistakes() {
    let env = TestEnv::new();
    let machine = Machine::new(&env);
    let init = machine.follow_guide("certs init");
    assert!(init.contains("created the authority of cluster prod"), "{init}");
    machine.follow_guide("certs issue");
    let shown = machine.follow_guide("certs show");
    assert!(shown.contains("reprise://prod/agent/node-1") && shown.contains("days left"), "{shown}");
    let key = fs::metadata(machine.certs("node-1").join("tls.key")).expect("a key");
    assert_eq!(key.permissions().mode() & 0o777, 0o600);

    for (line, words) in [
        ("reprise certs init /etc/reprise/authority --cluster prod", "has an authority already"),
        ("reprise certs init /etc/reprise/other --cluster Prod", "lower-case"),
        (
            "reprise certs issue agent/node-2 --authority /etc/reprise/authority --out /etc/reprise/certs/node-1",
            "agent/node-1",
        ),
        ("reprise certs issue root --authority /etc/reprise/authority --out /etc/reprise/x", "unknown role"),
        (
            "reprise certs issue member --authority /etc/reprise/none --out /etc/reprise/x",
            "reprise certs init",
        ),
        (
            "reprise certs issue member --authority /etc/reprise/authority --out /etc/reprise/x --valid 1h",
            "invalid validity",
        ),
        (
            "reprise certs issue member --authority /etc/reprise/authority --out /etc/reprise/x --valid 90",
            "90",
        ),
        ("reprise certs renew /etc/reprise/none --authority /etc/reprise/authority", "cannot read"),
        ("reprise certs show /etc/reprise", "ca.crt"),
        ("reprise certs authority switch /etc/reprise/authority", "authority add"),
    ] {
        let error = machine.refusal(line);
        assert!(error.contains(words), "{line}: {error}");
    }
    assert!(!machine.folder.join("x").exists(), "a refused command writes nothing");

    let files = env.configure(&machine.agent_config("member-1", &[]));
    let refused = env.refusal_of(&files, command(&files));
    refused.assert_reports(CONFIGURATION, &["tls.folder", "is of member", "agent/node-1"]);
    fs::remove_file(machine.certs("node-1").join("tls.crt")).expect("it exists");
    let files = env.configure(&machine.agent_config("node-1", &[]));
    env.refusal_of(&files, command(&files))
        .assert_reports(CONFIGURATION, &["tls.crt", "reprise certs issue"]);
}

#[test]
fn processes_follow_renewals_and_the_replacement_of_the_authority_and_warn_before_the_end() {
    let env = TestEnv::new();
    let machine = Machine::new(&env);
    machine.follow_guide("certs init");
    machine.follow_guide("certs issue");
    let (mut member, address, member_admin) = machine.start_member(&env);
    let mut agent = env.agent(&machine.agent_config("node-1", &[address]));
    let admin = &agent.admin().with_certificates(machine.certs("admin"), Expected::AnyAgent);
    let is_registered = || {
        let nodes = member_admin.json("/nodes");
        let is_alive = |node: &Value| node["name"] == "node-1" && node["alive"] == true;
        nodes.as_array().is_some_and(|nodes| nodes.iter().any(is_alive))
    };
    wait_until("the agent is registered", PATIENCE, || is_registered().then_some(()));
    assert_eq!(tls(admin, "identity"), "reprise://prod/agent/node-1");
    assert_eq!(tls(&member_admin, "identity"), "reprise://prod/member");
    let left = days_left(admin, "reprise_agent_tls_certificate_expiry_seconds");
    assert!((89.0..=90.0).contains(&left), "{left}");
    assert!(days_left(&member_admin, "reprise_controlplane_tls_authority_expiry_seconds") > 3_000.0);
    assert!(machine.follow_guide("doctor").contains("a renewal is due in 59 days"));
    assert!(machine.renew().contains("kept reprise://prod/agent/node-1"));

    // A certificate that was not renewed for too long: metric, log and doctor report it.
    env.require("the certificate ends soon");
    let folder = machine.certs("node-1");
    let_end_soon(&machine, &folder);
    wait_until_used(&[(admin, folder.clone())]);
    assert!(days_left(admin, "reprise_agent_tls_certificate_expiry_seconds") < 10.0);
    assert!(machine.follow_guide("doctor").contains("fair  certificates"));
    assert!(machine.renew().contains("renewed reprise://prod/agent/node-1"));
    wait_until_used(&[(admin, folder.clone())]);
    assert!(days_left(admin, "reprise_agent_tls_certificate_expiry_seconds") > 89.0);

    // A broken copy: the process keeps its credentials, and a renewal repairs the folder.
    env.require("keep the certificates before");
    let before = tls(admin, "fingerprint");
    fs::copy(machine.certs("admin").join("tls.key"), folder.join("tls.key")).expect("own folders");
    wait_until("the agent has refused the files", PATIENCE, || {
        (admin.metric("reprise_agent_tls_reloads_refused_total", "") > 0.0).then_some(())
    });
    assert_eq!(tls(admin, "fingerprint"), before);
    assert!(tls(admin, "problem").as_str().is_some_and(|problem| problem.contains("replace both together")));
    assert!(machine.renew().contains("did not belong together"));
    wait_until_used(&[(admin, folder.clone())]);
    assert_eq!(tls(admin, "problem"), Value::Null);

    let processes = [(admin, folder), (&member_admin, machine.certs("member-1"))];
    let first = tls(admin, "authorities_digest");
    for (step, authorities) in [("add", 2), ("switch", 2), ("remove", 1)] {
        let printed = machine.follow_guide(&format!("certs authority {step}"));
        if step != "remove" {
            let next = if step == "add" { "switch" } else { "remove" };
            let early = machine.refusal(&format!("reprise certs authority {next} /etc/reprise/authority"));
            assert!(early.contains("not renewed") && early.contains("agent/node-1"), "{early}");
        }
        machine.renew();
        wait_until_used(&processes);
        for (admin, _) in &processes {
            let digest = tls(admin, "authorities_digest");
            assert!(printed.contains(digest.as_str().expect("a text")), "{step}: {printed}");
            assert_eq!(tls(admin, "authorities"), authorities, "{step}");
        }
        assert!(is_registered(), "the agent stays registered: {step}");
    }
    assert_ne!(tls(admin, "authorities_digest"), first);
    assert_eq!(admin.metric("reprise_agent_tls_reloads_refused_total", ""), 1.0);
    // First, because it warns of a member that ends.
    agent.stop();
    assert!(member.terminate().success());
}
