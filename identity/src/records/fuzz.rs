//! Fuzz target of the record layer (`make fuzz`): sealed, changed and forged records, in pieces of any size.
//!
//! Laws: opened bytes are the sealed ones, in their order, until a record was changed; a changed record is refused; no size
//! exceeds that of a record.

use std::sync::Arc;
use std::thread;

use reprise_fuzz::Unstructured;
use rustls::crypto::cipher::AeadKey;
use rustls::{ConnectionTrafficSecrets, ContentType};

use super::*;
use crate::authority::{Authority, CERTIFICATE_VALID};
use crate::blocking::{Channel, Wire};
use crate::credentials::{Credentials, Files};
use crate::name::Identity;
use crate::tls::{Expected, Tls, TlsError};

/// Most records of an input.
const RECORDS_MAX: usize = 24;

#[test]
fn identity_records() {
    let seeds: Vec<Vec<u8>> = (0..8_u8)
        .map(|seed| (0..64_u8).map(|at| at.wrapping_mul(67).wrapping_add(seed * 23)).collect())
        .collect();
    reprise_fuzz::check("identity_records", &seeds, run());
}

/// An end of a connection within this process.
struct Pipe(std::os::unix::net::UnixStream);

impl Wire for Pipe {
    type Error = TlsError;

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        Ok(std::io::Read::read(&mut self.0, into)?)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), TlsError> {
        Ok(std::io::Write::write_all(&mut self.0, bytes)?)
    }
}

/// The sources of next keys of both ends of a connection, the sender's first.
fn connection() -> [Arc<Keys>; 2] {
    let authority = Authority::create("c").expect("an authority");
    let tls = |role: &str| {
        let identity = Identity::new("c", role.parse().expect("a role")).expect("valid names");
        let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a certificate");
        let authorities = authority.certificate().as_bytes().to_vec();
        let files =
            Files { authorities, certificate: issued.certificate.into_bytes(), key: issued.key.into_bytes() };
        Tls::new(Credentials::parse(&files).expect("valid files"))
    };
    let (client, server) = (tls("agent/n1"), tls("agent/n2"));
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
    let accepting = thread::spawn(move || server.accept_blocking(&mut Pipe(far)).expect("a valid client"));
    let Channel { sealer, .. } =
        client.dial_blocking(&mut Pipe(near), Expected::AnyAgent).expect("a valid server");
    let Channel { opener, .. } = accepting.join().expect("no panic");
    [sealer.keys, opener.keys]
}

/// The same keys for each input: a run must not depend on earlier ones.
fn secrets() -> ConnectionTrafficSecrets {
    let (key, iv) = (AeadKey::from([7; 32]), Iv::copy(&[9; 12]));
    ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }
}

fn run() -> impl Fn(&[u8]) {
    let [sending, receiving] = connection();
    let algorithm = rustls::crypto::ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256;
    let algorithm = algorithm.tls13().expect("a suite of TLS 1.3").aead_alg;
    move |input| {
        let key = SealingKey::new(secrets()).expect("a key");
        let sealer =
            Sealer { key, sequence: 0, records_per_key: RECORDS_PER_KEY, keys: Arc::clone(&sending) };
        let opener = Opener {
            decrypter: decrypter(algorithm, secrets()).expect("a key"),
            sequence: 0,
            is_after_change: false,
            early_changes: 0,
            keys: Arc::clone(&receiving),
        };
        converse(sealer, opener, &mut Unstructured::new(input));
    }
}

/// A record on its way.
struct Sent {
    bytes: Vec<u8>,
    /// Content of data that was not changed.
    plain: Option<Vec<u8>>,
}

fn converse(mut sealer: Sealer, mut opener: Opener, choices: &mut Unstructured<'_>) {
    let mut stream = Vec::new();
    let mut is_intact = true;
    let mut expected = Vec::new();
    for _ in 0..RECORDS_MAX {
        if choices.is_empty() {
            break;
        }
        let Some(sent) = record(&mut sealer, choices) else { break };
        is_intact &= sent.plain.is_some();
        if let (true, Some(plain)) = (is_intact, sent.plain) {
            expected.extend_from_slice(&plain);
        }
        stream.extend_from_slice(&sent.bytes);
    }
    let opened = open_all(&mut opener, &stream, choices);
    assert!(expected.starts_with(&opened) || opened.starts_with(&expected), "other bytes than were sent");
    assert!(opened.len() <= expected.len(), "bytes of a changed record");
}

/// Seals a record, or makes one up.
fn record(sealer: &mut Sealer, choices: &mut Unstructured<'_>) -> Option<Sent> {
    let kind = choices.int_in_range(0..=9_u8).ok()?;
    let mut bytes = vec![0; SEALED_BYTES_MAX];
    let count = match choices.int_in_range(0..=9_u8).ok()? {
        0 => RECORD_PLAIN_BYTES_MAX,
        _ => choices.int_in_range(1..=200).ok()?,
    };
    let value: u8 = choices.arbitrary().ok()?;
    if kind == 0 {
        let count = choices.int_in_range(1..=40).ok()?;
        return Some(Sent { bytes: choices.bytes(count).ok()?.to_vec(), plain: None });
    }
    let written = match kind {
        1 => {
            let (level, reason) = (choices.arbitrary().ok()?, choices.arbitrary().ok()?);
            bytes[RECORD_HEADER_BYTES..][..2].copy_from_slice(&[level, reason]);
            sealer.encrypt(ContentType::Alert, &mut bytes, 2).expect("a short record")
        }
        2 => {
            bytes[RECORD_HEADER_BYTES..][..KEY_UPDATE.len()].copy_from_slice(&KEY_UPDATE);
            bytes[RECORD_HEADER_BYTES + 4] = u8::from(choices.ratio(1, 2_u8).ok()?);
            sealer.encrypt(ContentType::Handshake, &mut bytes, KEY_UPDATE.len()).expect("a short record")
        }
        3 => sealer.encrypt(ContentType::ApplicationData, &mut bytes, 0).expect("a short record"),
        _ => sealer
            .seal(&mut bytes, |plain| {
                plain[..count].fill(value);
                count
            })
            .expect("a permitted size"),
    };
    bytes.truncate(written);
    if kind == 4 {
        let at = choices.choose_index(bytes.len()).ok()?;
        bytes[at] ^= choices.int_in_range(1..=255).ok()?;
        return Some(Sent { bytes, plain: None });
    }
    Some(Sent { bytes, plain: (kind > 4).then(|| vec![value; count]) })
}

/// Opens the records of a stream that arrives in pieces, up to the first violation.
fn open_all(opener: &mut Opener, stream: &[u8], choices: &mut Unstructured<'_>) -> Vec<u8> {
    let (mut received, mut opened, mut rest) = (Vec::new(), Vec::new(), stream);
    loop {
        let bytes = match Opener::record_bytes(&received) {
            Err(_) => return opened,
            Ok(bytes) => bytes,
        };
        assert!(bytes.is_none_or(|bytes| bytes <= RECORD_BYTES_MAX));
        match bytes.filter(|bytes| *bytes <= received.len()) {
            Some(bytes) => {
                let mut record: Vec<u8> = received.drain(..bytes).collect();
                match opener.open(&mut record) {
                    Ok(Opened::Data(count)) => {
                        opened.extend_from_slice(&record[RECORD_HEADER_BYTES..][..count]);
                    }
                    Ok(Opened::NextKey) => {}
                    Ok(Opened::Closed) | Err(_) => return opened,
                }
            }
            None if rest.is_empty() => return opened,
            None => {
                let count = choices.int_in_range(1..=rest.len()).unwrap_or(rest.len()).max(1);
                received.extend_from_slice(&rest[..count]);
                rest = &rest[count..];
            }
        }
    }
}
