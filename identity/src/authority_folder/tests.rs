//! Issues, renewals and the replacement of an authority, with real folders.

use std::os::unix::fs::PermissionsExt as _;

use tempfile::TempDir;
use time::OffsetDateTime;

use super::*;
use crate::credentials::KEY_FILE;

const DAY: Duration = Duration::from_secs(86_400);
const VALID: Duration = Duration::from_secs(90 * 86_400);

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn agent(node: &str) -> Role {
    Role::Agent(node.to_owned())
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("the file exists").permissions().mode() & 0o777
}

fn text_of(result: Result<impl std::fmt::Debug, FolderError>) -> String {
    result.expect_err("must be refused").to_string()
}

#[test]
fn creates_an_authority_once_with_a_key_that_only_the_owner_reads() {
    let folder = folder();
    let path = folder.path().join("ca");
    let created = AuthorityFolder::create(&path, "prod").expect("a new folder");
    assert_eq!((created.cluster(), created.step(), created.authorities().len()), ("prod", Step::Settled, 1));
    assert_eq!((mode(&path), mode(&path.join("ca.key")), mode(&path.join("ca.crt"))), (0o700, 0o600, 0o644));
    let key = fs::read(path.join("ca.key")).expect("the key");
    drop(created);
    let again = text_of(AuthorityFolder::create(&path, "prod"));
    assert!(again.contains("already") && again.contains("reprise certs authority add"), "{again}");
    assert_eq!(fs::read(path.join("ca.key")).expect("the key"), key, "nothing changes");
    let name = text_of(AuthorityFolder::create(&folder.path().join("other"), "Prod_1"));
    assert!(name.contains("lower-case"), "{name}");
}

#[test]
fn refuses_folders_without_a_usable_authority_with_the_remedy() {
    let folder = folder();
    let absent = text_of(AuthorityFolder::open(folder.path()));
    assert!(absent.contains("no ca.key") && absent.contains("reprise certs init"), "{absent}");
    drop(AuthorityFolder::create(folder.path(), "c").expect("an empty folder"));
    let key = folder.path().join("ca.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).expect("own file");
    let readable = text_of(AuthorityFolder::open(folder.path()));
    assert!(readable.contains("mode 640") && readable.contains("chmod 600"), "{readable}");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("own file");
    fs::write(&key, Authority::create("c").expect("a name").key()).expect("own file");
    let mixed = text_of(AuthorityFolder::open(folder.path()));
    assert!(mixed.contains("not the key of a certificate"), "{mixed}");
}

#[test]
fn issues_into_a_folder_of_the_same_process_only() {
    let folder = folder();
    let authority = AuthorityFolder::create(&folder.path().join("ca"), "c").expect("a new folder");
    let node = folder.path().join("node-1");
    let record = authority.issue(agent("node-1"), VALID, &node).expect("a certificate");
    let credentials = Credentials::read(&node).expect("valid files");
    credentials.check_issuer().expect("issued by the authority");
    assert_eq!(credentials.identity.to_string(), "reprise://c/agent/node-1");
    assert_eq!(
        (record.fingerprint, mode(&node.join(KEY_FILE)), mode(&node)),
        (credentials.fingerprint, 0o600, 0o700)
    );
    let other = text_of(authority.issue(agent("node-2"), VALID, &node));
    assert!(other.contains("agent/node-1") && other.contains("another folder"), "{other}");
    authority.issue(agent("node-1"), VALID, &node).expect("the same process");
    let into_authority = text_of(authority.issue(Role::Admin, VALID, &folder.path().join("ca")));
    assert!(into_authority.contains("choose another folder"), "{into_authority}");
    for (valid, words) in
        [(DAY / 2, "invalid validity"), (9_999 * DAY, "invalid validity"), (3_650 * DAY, "exceeds")]
    {
        let refused = text_of(authority.issue(Role::Member, valid, &folder.path().join("m")));
        assert!(refused.contains(words), "{refused}");
    }
    assert!(!folder.path().join("m").exists(), "a refused certificate leaves no files");
    assert_eq!(authority.issued().expect("a list").len(), 1, "one record for each folder");
}

#[test]
fn renews_with_the_same_identity_when_due_or_forced() {
    let folder = folder();
    let authority = AuthorityFolder::create(&folder.path().join("ca"), "c").expect("a new folder");
    let node = folder.path().join("node-1");
    let first = authority.issue(agent("node-1"), VALID, &node).expect("a certificate");
    let not_due = authority.renew(&node, VALID, None).expect("a valid folder");
    let Renewal::NotDue { due_in, .. } = not_due else { panic!("{not_due:?}") };
    assert!(due_in > 59 * DAY && due_in <= 60 * DAY, "{due_in:?}");
    let forced = authority.renew(&node, VALID, Some("asked for")).expect("a valid folder");
    assert!(matches!(&forced, Renewal::Renewed { record, .. } if record.fingerprint != first.fingerprint));

    let now = OffsetDateTime::now_utc();
    let due = authority.issuer.issue_between(&first.identity, now - 70 * DAY, now + 20 * DAY);
    let due = due.expect("a certificate");
    write::replace(&node, CERTIFICATE_FILE, write::PUBLIC, due.certificate.as_bytes()).expect("own folder");
    let mixed = authority.renew(&node, VALID, None).expect("the certificate names the process");
    assert!(matches!(mixed, Renewal::Renewed { why, .. } if why.contains("belong together")));
    write::replace(&node, CERTIFICATE_FILE, write::PUBLIC, due.certificate.as_bytes()).expect("own folder");
    write::replace(&node, KEY_FILE, write::SECRET, due.key.as_bytes()).expect("own folder");
    let renewed = authority.renew(&node, VALID, None).expect("a valid folder");
    assert!(matches!(renewed, Renewal::Renewed { why, .. } if why.contains("a third")));

    let absent = text_of(authority.renew(&folder.path().join("none"), VALID, None));
    assert!(absent.contains("cannot read") && absent.contains("reprise certs issue"), "{absent}");
    let other = AuthorityFolder::create(&folder.path().join("other"), "d").expect("a new folder");
    let foreign = text_of(other.renew(&node, VALID, Some("asked for")));
    assert!(foreign.contains("cluster d"), "{foreign}");
}

/// Whether two folders' processes accept each other's certificates.
fn accept_each_other(one: &Path, two: &Path) -> bool {
    let read = |folder: &Path| Files::read(folder).expect("three files");
    let is_accepted = |own: &Path, other: &Path| {
        let files = Files { authorities: read(own).authorities, ..read(other) };
        Credentials::parse(&files).expect("valid files").check_issuer().is_ok()
    };
    is_accepted(one, two) && is_accepted(two, one)
}

#[test]
fn authority_is_replaced_in_three_steps_while_all_processes_accept_each_other() {
    let folder = folder();
    let path = folder.path().join("ca");
    let authority = AuthorityFolder::create(&path, "c").expect("a new folder");
    let nodes: Vec<PathBuf> = (1..=3).map(|node| folder.path().join(format!("node-{node}"))).collect();
    for (number, node) in nodes.iter().enumerate() {
        authority.issue(agent(&format!("node-{number}")), VALID, node).expect("a certificate");
    }
    let former = authority.issuer();
    let renew_all = |authority: &AuthorityFolder, why: &str| {
        for node in &nodes {
            // Some folders are renewed and others are not: all accept each other at any time.
            assert!(nodes.iter().all(|other| accept_each_other(node, other)));
            let renewal = authority.renew(node, VALID, None).expect("a valid folder");
            assert!(
                matches!(renewal, Renewal::Renewed { why: found, .. } if found.contains(why)),
                "{renewal:?}"
            );
            assert!(nodes.iter().all(|other| accept_each_other(node, other)));
        }
    };

    drop(authority);
    let open = || AuthorityFolder::open(&path).expect("an authority");
    for (early, words) in
        [(open().switch(Unrenewed::Refuse), "authority add"), (open().remove(Unrenewed::Refuse), "only one")]
    {
        assert!(text_of(early).contains(words), "{words}");
    }
    let added = open().add().expect("the first step");
    assert_eq!((added.step(), added.authorities().len(), added.issuer()), (Step::Added, 2, former));
    assert!(text_of(added.add()).contains("authority switch"));
    assert!(text_of(open().remove(Unrenewed::Refuse)).contains("authority switch"));
    let left = text_of(open().switch(Unrenewed::Refuse));
    assert!(nodes.iter().all(|node| left.contains(&*node.to_string_lossy())), "{left}");
    renew_all(&open(), "authorities have changed");
    let switched = open().switch(Unrenewed::Refuse).expect("all were renewed");
    assert!(switched.step() == Step::Switched && switched.issuer() != former);
    assert!(text_of(switched.add()).contains("authority remove"));
    assert!(text_of(open().switch(Unrenewed::Refuse)).contains("authority remove"));
    assert!(text_of(open().remove(Unrenewed::Refuse)).contains("agent/node-0"));
    renew_all(&open(), "another authority");
    let removed = open().remove(Unrenewed::Refuse).expect("all were renewed");
    assert_eq!((removed.step(), removed.authorities().len()), (Step::Settled, 1));
    renew_all(&removed, "authorities have changed");
    assert!(removed.authorities().iter().all(|one| one.fingerprint != former));
}

#[test]
fn a_lost_node_can_be_abandoned_and_an_interrupted_step_is_repeated() {
    let folder = folder();
    let authority = AuthorityFolder::create(folder.path(), "c").expect("an empty folder");
    authority.issue(agent("lost"), VALID, &folder.path().join("lost")).expect("a certificate");
    // As after a crash between the two files of `add`.
    replace(folder.path(), NEXT_KEY_FILE, write::SECRET, b"").expect("own folder");
    drop(authority);
    let open = || AuthorityFolder::open(folder.path()).expect("an authority");
    assert_eq!(open().step(), Step::Settled);
    drop(open().add().expect("repeated"));
    assert!(text_of(open().switch(Unrenewed::Refuse)).contains("--force"));
    drop(open().switch(Unrenewed::Abandon).expect("abandoned"));
    drop(open().remove(Unrenewed::Abandon).expect("abandoned"));
    assert_eq!(open().authorities().len(), 1);
}
