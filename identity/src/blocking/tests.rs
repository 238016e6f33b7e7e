//! Handshakes over a pair of sockets, and the records behind them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use super::*;
use crate::authority::{Authority, CERTIFICATE_VALID};
use crate::name::Role;
use crate::records::{Opened, RECORD_HEADER_BYTES, RECORD_PLAIN_BYTES_MAX, RecordError, SEALED_BYTES_MAX};

/// Longer than any wait of a passing test.
const PATIENCE: Duration = Duration::from_secs(60);

struct Pipe(UnixStream);

impl Wire for Pipe {
    type Error = TlsError;

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        Ok(self.0.read(into)?)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), TlsError> {
        Ok(self.0.write_all(bytes)?)
    }
}

fn pipes() -> (Pipe, Pipe) {
    let (one, other) = UnixStream::pair().expect("a socket pair");
    for stream in [&one, &other] {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    }
    (Pipe(one), Pipe(other))
}

fn authority() -> Authority {
    Authority::create("c").expect("an authority")
}

fn tls(authority: &Authority, role: &str) -> Tls {
    let identity = Identity::new("c", role.parse().expect("a role")).expect("valid names");
    let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a certificate");
    Tls::new(issued.into_credentials(authority.certificate()).expect("valid files"))
}

/// Both sides of a connection, the client first.
fn connected() -> ((Channel, Pipe), (Channel, Pipe)) {
    let authority = authority();
    let (client, server) = (tls(&authority, "agent/n1"), tls(&authority, "agent/n2"));
    let (mut near, mut far) = pipes();
    let accepting = thread::spawn(move || (server.accept_blocking(&mut far).expect("a valid client"), far));
    let dialled = client.dial_blocking(&mut near, Expected::AnyAgent).expect("a valid server");
    ((dialled, near), accepting.join().expect("no panic"))
}

/// Encrypts bytes; returns the records, one or two.
fn seal(sealer: &mut Sealer, plain: &[u8]) -> Vec<Vec<u8>> {
    let mut sealed = vec![0; SEALED_BYTES_MAX];
    let fill = |into: &mut [u8]| {
        into[..plain.len()].copy_from_slice(plain);
        plain.len()
    };
    let written = sealer.seal(&mut sealed, fill).expect("a valid size");
    let (mut rest, mut records) = (&sealed[..written], Vec::new());
    while let Some(bytes) = Opener::record_bytes(rest).expect("records") {
        let (record, behind) = rest.split_at(bytes);
        records.push(record.to_vec());
        rest = behind;
    }
    records
}

fn open(opener: &mut Opener, record: &[u8]) -> Result<Vec<u8>, RecordError> {
    assert_eq!(Opener::record_bytes(record).expect("a record"), Some(record.len()));
    let mut record = record.to_vec();
    match opener.open(&mut record)? {
        Opened::Data(bytes) => Ok(record[RECORD_HEADER_BYTES..][..bytes].to_vec()),
        Opened::NextKey | Opened::Closed => Ok(Vec::new()),
    }
}

#[test]
fn both_sides_learn_the_identity_of_the_other_and_exchange_records() {
    let ((mut client, _near), (mut server, _far)) = connected();
    assert_eq!(client.identity.role, Role::Agent("n2".to_owned()));
    assert_eq!(server.identity.role, Role::Agent("n1".to_owned()));
    for plain in [&[7][..], &[1; RECORD_PLAIN_BYTES_MAX]] {
        let [record] = &seal(&mut client.sealer, plain)[..] else { panic!("one record") };
        assert_eq!(open(&mut server.opener, record).expect("unchanged"), plain);
        let [record] = &seal(&mut server.sealer, plain)[..] else { panic!("one record") };
        assert_eq!(open(&mut client.opener, record).expect("unchanged"), plain);
    }
}

#[test]
fn keys_change_in_both_directions_while_records_flow() {
    let ((client, _near), (server, _far)) = connected();
    let mut sealers = [client.sealer, server.sealer].map(|sealer| sealer.with_records_per_key(3));
    let mut openers = [server.opener, client.opener];
    for number in 0..20_u8 {
        for (sealer, opener) in sealers.iter_mut().zip(&mut openers) {
            let records = seal(sealer, &[number; 100]);
            assert_eq!(
                records.len(),
                if number > 0 && number.is_multiple_of(3) { 2 } else { 1 },
                "record {number}"
            );
            let opened: Vec<u8> =
                records.iter().flat_map(|record| open(opener, record).expect("unchanged")).collect();
            assert_eq!(opened, [number; 100]);
        }
    }
}

#[test]
fn changes_of_the_key_without_data_between_them_are_refused() {
    let ((client, _near), (mut server, _far)) = connected();
    let mut sealer = client.sealer.with_records_per_key(0);
    for record in seal(&mut sealer, b"block") {
        open(&mut server.opener, &record).expect("a change, and data");
    }
    let changes = [(); 2].map(|()| seal(&mut sealer, &[]).remove(0));
    open(&mut server.opener, &changes[0]).expect("a change behind data");
    assert!(matches!(open(&mut server.opener, &changes[1]), Err(RecordError::Malformed(_))));
}

#[test]
fn early_changes_of_the_key_are_bounded() {
    let ((client, _near), (mut server, _far)) = connected();
    let mut sealer = client.sealer.with_records_per_key(0);
    let mut opened = 0;
    let refused = loop {
        let records = seal(&mut sealer, b"block");
        let result: Result<Vec<_>, _> =
            records.iter().map(|record| open(&mut server.opener, record)).collect();
        match result {
            Ok(_) => opened += 1,
            Err(error) => break error,
        }
        assert!(opened < 1_000, "changes without a bound");
    };
    assert!(matches!(refused, RecordError::Malformed("too many changes of the key")), "{refused}");
    assert_eq!(opened, 16, "a sender may change its key early a few times");
}

#[test]
fn changed_repeated_and_foreign_records_are_refused() {
    let ((mut client, _near), (mut server, _far)) = connected();
    let records = seal(&mut client.sealer, b"block");
    let mut changed = records[0].clone();
    *changed.last_mut().expect("it has bytes") ^= 1;
    assert!(matches!(open(&mut server.opener, &changed), Err(RecordError::Tls(_))));
    assert_eq!(open(&mut server.opener, &records[0]).expect("unchanged"), b"block");
    assert!(open(&mut server.opener, &records[0]).is_err(), "a record is valid once");
    assert!(Opener::record_bytes(b"GET / HTTP/1.1").is_err());
    assert!(Opener::record_bytes(&[23, 3, 3, 0x41, 1]).is_err(), "longer than a record may be");
    assert!(matches!(Opener::record_bytes(&[23, 3, 3, 0]), Ok(None)));
    assert!(seal(&mut client.sealer, &[]).is_empty(), "no record without content");
}

#[test]
fn bytes_behind_the_handshake_are_kept() {
    let authority = authority();
    let (client, server) = (tls(&authority, "agent/n1"), tls(&authority, "agent/n2"));
    let (mut near, mut far) = pipes();
    let (sent, is_sent) = std::sync::mpsc::channel();
    /// Waits with its first receive after the client's hello until the client has sent all.
    struct Late(Pipe, std::sync::mpsc::Receiver<()>, usize);
    impl Wire for Late {
        type Error = TlsError;

        fn receive(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
            self.2 += 1;
            if self.2 == 2 {
                self.1.recv_timeout(PATIENCE).expect("the client sends");
            }
            self.0.receive(into)
        }

        fn send(&mut self, bytes: &[u8]) -> Result<(), TlsError> {
            self.0.send(bytes)
        }
    }
    let dialling = thread::spawn(move || {
        let mut channel = client.dial_blocking(&mut near, Expected::AnyAgent).expect("a valid server");
        let records = seal(&mut channel.sealer, b"hello").concat();
        near.send(&records).expect("connected");
        sent.send(()).expect("the server waits");
        near
    });
    let mut late = Late(Pipe(far.0.try_clone().expect("a descriptor")), is_sent, 0);
    let mut channel = server.accept_blocking(&mut late).expect("a valid client");
    let mut received = channel.plain;
    let mut rest = channel.unopened;
    while received.len() < 5 {
        let whole = Opener::record_bytes(&rest).expect("records").filter(|bytes| *bytes <= rest.len());
        match whole {
            Some(bytes) => {
                let record: Vec<u8> = rest.drain(..bytes).collect();
                received.extend(open(&mut channel.opener, &record).expect("unchanged"));
            }
            None => {
                let mut bytes = [0; 512];
                let count = far.receive(&mut bytes).expect("connected");
                rest.extend_from_slice(&bytes[..count]);
            }
        }
    }
    assert_eq!(received, b"hello");
    drop(dialling.join().expect("no panic"));
}

#[test]
fn refused_sides_learn_why() {
    let (own, foreign) = (authority(), authority());
    let server = tls(&own, "agent/n2");
    // A client of another authority trusts none of the server's either; so it refuses first.
    let (mut near, mut far) = pipes();
    let accepting = thread::spawn(move || server.accept_blocking(&mut far).map(|_| ()));
    let error = tls(&foreign, "agent/n1").dial_blocking(&mut near, Expected::AnyAgent).map(|_| ());
    assert!(error.expect_err("another authority").to_string().contains("certificate"));
    let seen = accepting.join().expect("no panic").expect_err("another authority").to_string();
    assert!(seen.contains("UnknownCA") || seen.contains("alert"), "{seen}");
}

#[test]
fn plain_and_endless_bytes_end_the_handshake() {
    let authority = authority();
    let hello = [22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff];
    let endless = [&hello[..], &[0; 0x4000 - 4], &[22, 3, 1, 0x40, 0], &[0; 0x4000]].concat();
    for bytes in [&b"RPRSPEER and more"[..], b"GET / HTTP/1.1\r\n\r\n", &hello, &endless.repeat(8)] {
        let server = tls(&authority, "agent/n2");
        let (mut near, mut far) = pipes();
        let bytes = bytes.to_vec();
        // The other side may refuse before all is sent.
        let sending =
            thread::spawn(move || (near.send(&bytes).is_ok(), near.0.shutdown(std::net::Shutdown::Write)));
        let error = server.accept_blocking(&mut far).map(|_| ()).expect_err("no handshake");
        assert!(matches!(error, TlsError::Handshake(_)), "{error}");
        drop(far);
        drop(sending.join().expect("no panic"));
    }
}
