//! Fuzz target of certificates and names (`make fuzz`): the three files of a process, the list of an authority, and names.

use std::sync::OnceLock;

use reprise_fuzz::Unstructured;
use rustls::pki_types::CertificateDer;

use crate::authority::{Authority, CERTIFICATE_VALID};
use crate::authority_folder::IssuedRecord;
use crate::certificate::{self, CertificateFacts, Fingerprint};
use crate::credentials::{Credentials, Files, identity_of};
use crate::name::{Identity, Role};

#[test]
fn identity_files() {
    let names = [b"\x05reprise://c/agent/node-1".to_vec(), b"\x05reprise://c/member".to_vec()];
    let list = br#"[{"identity":"reprise://c/member","folder":"/x","fingerprint":""#;
    let list = [&[4][..], &list[..], &[b'0'; 64], br#"","issuer":"0"}]"#].concat();
    let changes = (0..4_u8).map(|file| vec![file, 1, 200, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    // A time beyond any calendar, and signs in place of digits.
    let zeros = "0".repeat(64);
    let late = format!(
        r#"[{{"identity":"reprise://c/member","folder":"/x","fingerprint":"{zeros}","issuer":"{zeros}","authorities":"{zeros}","not_after":18446744073709551615}}]"#
    );
    let late = [&[4][..], late.as_bytes()].concat();
    let signs = [&[5][..], "+f".repeat(32).as_bytes()].concat();
    let seeds: Vec<Vec<u8>> = changes.chain(names).chain([list, late, signs]).collect();
    reprise_fuzz::check("identity_files", &seeds, run);
}

/// Files of a process, and the encoding of its certificate. Keys differ with each run of the program, so inputs change
/// places in them and do not contain them.
fn files() -> &'static (Files, Vec<u8>) {
    static FILES: OnceLock<(Files, Vec<u8>)> = OnceLock::new();
    FILES.get_or_init(|| {
        let authority = Authority::create("c").expect("an authority");
        let identity = Identity::new("c", Role::Agent("node-1".to_owned())).expect("valid names");
        let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a certificate");
        let authorities = authority.certificate().as_bytes().to_vec();
        let encoded =
            certificate::certificates(issued.certificate.as_bytes()).expect("a certificate")[0].to_vec();
        (
            Files { authorities, certificate: issued.certificate.into_bytes(), key: issued.key.into_bytes() },
            encoded,
        )
    })
}

fn run(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let Ok(kind) = choices.int_in_range(0..=5_u8) else { return };
    let (valid, encoded) = files();
    let mut changed = valid.clone();
    match kind {
        0 => change(&mut changed.authorities, &mut choices),
        1 => change(&mut changed.certificate, &mut choices),
        2 => change(&mut changed.key, &mut choices),
        3 => {
            let mut encoded = encoded.clone();
            change(&mut encoded, &mut choices);
            return certificate(&encoded);
        }
        _ => return text(kind, choices.take_rest()),
    }
    match Credentials::parse(&changed) {
        Ok(credentials) => {
            // A certificate may be issued by another authority. Its identity is signed, unless the file has changed.
            if credentials.check_issuer().is_ok() {
                assert_eq!(credentials.identity.to_string(), "reprise://c/agent/node-1");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Changes, removes and inserts bytes.
fn change(bytes: &mut Vec<u8>, choices: &mut Unstructured<'_>) {
    while !choices.is_empty() && !bytes.is_empty() {
        let at = choices.choose_index(bytes.len()).unwrap_or(0);
        match choices.int_in_range(0..=5_u8).unwrap_or(0) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, choices.arbitrary().unwrap_or(0)),
            2 => drop(bytes.remove(at)),
            3 => {
                let end = bytes.len().min(at + 40);
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => bytes[at] = choices.arbitrary().unwrap_or(0),
        }
    }
}

/// Reads a certificate in DER. The law: a changed one is not verified, which is tested elsewhere; here none panics.
fn certificate(encoded: &[u8]) {
    let encoded = CertificateDer::from(encoded);
    if let Ok(facts) = CertificateFacts::of(&encoded) {
        assert_eq!(facts.fingerprint, Fingerprint::of(&encoded));
    }
    if let Ok(identity) = identity_of(&encoded) {
        assert_eq!(identity.to_string().parse(), Ok(identity));
    }
}

fn text(kind: u8, bytes: &[u8]) {
    if kind == 4 {
        if let Ok(records) = serde_json::from_slice::<Vec<IssuedRecord>>(bytes) {
            let written = serde_json::to_vec(&records).expect("records are JSON");
            assert_eq!(serde_json::from_slice::<Vec<IssuedRecord>>(&written).expect("as written"), records);
        }
        return;
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(identity) = text.parse::<Identity>() {
        assert_eq!(identity.to_string(), text);
    }
    if let Ok(role) = text.parse::<Role>() {
        assert_eq!(role.to_string(), text);
    }
    for part in certificate::split(text) {
        assert!(part.starts_with("-----BEGIN") && part.ends_with("-----\n"));
    }
    if let Ok(fingerprint) = Fingerprint::try_from(text.to_owned()) {
        assert_eq!(fingerprint.to_string(), text.to_ascii_lowercase());
    }
}
