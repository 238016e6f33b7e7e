//! Users and groups of tenants on hosts without Kubernetes: the user of a process decides the tenant of its sessions.

use std::fs;
use std::process::Command;

use reprise_client::ClientError;
use reprise_e2e::content::small;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, Engine, TestEnv};
use reprise_policy::{ByteSize, TenantName};
use reprise_testkit::configuration;

/// A user of tenant `team-b`, and one of its group only.
const LISTED: (u32, u32) = (5000, 6000);
const OF_GROUP: (u32, u32) = (5999, 6001);

/// A user that no list contains.
const STRANGER: (u32, u32) = (5998, 6000);

/// The last allowed user may connect, but belongs to no tenant.
const TENANTS: &str = "
[[tenants]]
name = \"team-a\"
uids = [\"5100\"]
[[tenants]]
name = \"team-b\"
uids = [\"5000-5099\"]
gids = [\"6001\"]
";

/// Saves a block as a process of a user, loads it again, and returns the error if that fails.
fn check(agent: &Agent, (uid, gid): (u32, u32), tenant: &str, run: &str) -> Result<(), String> {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()]);
    // The folders of tests belong to root.
    command.args(["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]);
    command.arg(binary("reprise")).args(["check", "--within=30s", "--tenant", tenant, "--run", run]);
    command.arg("--socket").arg(&agent.files().socket);
    let output = command.output().expect("setpriv, of util-linux, can be run");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn the_user_of_a_process_decides_the_tenant_of_its_sessions() {
    let env = TestEnv::new();
    env.allow("session rejected");
    let agent = env.agent(&AgentConfig {
        arena: ByteSize(32 << 20),
        session: format!("mode = \"0666\"\nallow_uids = [0, {}]", STRANGER.0),
        extra: TENANTS.to_owned(),
        ..AgentConfig::named("node")
    });
    for tenant in ["team-a", "team-b", "team-c"] {
        let tenant: TenantName = tenant.parse().expect("a name");
        configuration::provide_salt(&agent.files().socket, &tenant).expect("the folder is the test's");
    }
    assert_eq!(check(&agent, LISTED, "team-b", "by-user"), Ok(()));
    assert_eq!(check(&agent, OF_GROUP, "team-b", "by-group"), Ok(()));
    assert_eq!(check(&agent, STRANGER, "team-c", "without-users"), Ok(()));
    assert_eq!(check(&agent, STRANGER, "default", "default"), Ok(()));
    for (ids, tenant, wanted) in [
        (LISTED, "team-a", "belongs to tenant 'team-b', not to 'team-a'"),
        (LISTED, "default", "belongs to tenant 'team-b', not to 'default'"),
        (OF_GROUP, "team-a", "belongs to tenant 'team-b', not to 'team-a'"),
        (STRANGER, "team-b", "is kept for its users"),
        ((5200, 6000), "team-b", "add it to session.allow_uids"),
    ] {
        let words = check(&agent, ids, tenant, "refused").expect_err("refused");
        assert!(words.contains(wanted), "{words}");
    }
    // Root serves all tenants: it may read their salts anyway.
    agent.engine_of(small(), "team-b").save_durably(&[1]);
}

#[test]
fn a_tenant_without_a_salt_gets_a_session_when_the_salt_exists() {
    let env = TestEnv::new();
    env.allow("session rejected");
    let agent = env.agent(&AgentConfig::named("node"));
    let tenant: TenantName = "team-a".parse().expect("a name");
    let socket = &agent.files().socket;
    let connect = || Engine::connect_with_salt(socket, small(), &tenant);
    let Err(ClientError::BadRequest(words)) = connect() else { panic!("the tenant has no salt") };
    assert!(words.contains("reprise tenant create-salt team-a --folder"), "{words}");
    let folder = configuration::salts_folder(socket);
    let create = || {
        let mut command = Command::new(binary("reprise"));
        let output = command.args(["tenant", "create-salt", "team-a", "--folder"]).arg(&folder).output();
        let output = output.expect("reprise can be run");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(create(), (true, String::new()));
    let salt = fs::read(folder.join("team-a")).expect("the salt");
    connect().expect("the agent needs no restart").save_durably(&[1]);
    let (succeeded, words) = create();
    assert!(!succeeded && words.contains("exists"), "{words}");
    assert_eq!(fs::read(folder.join("team-a")).expect("the salt"), salt);
}
