//! Limits, generations and ends of grants, in given and random orders.

use proptest::prelude::*;

use super::*;

const LIMITS: QueueGrantLimits = QueueGrantLimits { pairs_per_device: 8, pairs_per_session: 6, depth: 64 };
const SERIAL: &str = "S1";
const ONE: SessionId = SessionId(1);
const TWO: SessionId = SessionId(2);

fn table() -> QueueGrants {
    let mut table = QueueGrants::new(LIMITS);
    for session in [ONE, TWO] {
        assert_eq!(table.register(session, 4096), Ok(MemoryNumber(1)));
    }
    table
}

fn of(session: SessionId, pairs: u32) -> QueueRequest {
    QueueRequest { session, tenant: TenantId(1), device: 3, pairs, depth: 64, memory: MemoryNumber(1) }
}

/// Sessions 1 and 2 have one tenant, session 3 another.
fn tenant_of(session: SessionId) -> TenantId {
    TenantId(session.0 as u16 / 3)
}

fn granted(table: &mut QueueGrants, request: QueueRequest) -> GrantGeneration {
    let generation = table.request(request, SERIAL).expect("within the limits");
    table.created(generation);
    generation
}

#[test]
fn requests_outside_of_the_limits_name_the_limit() {
    let mut table = table();
    for (request, words) in [
        (of(ONE, 0), "expected 1 to 6"),
        (of(ONE, 7), "expected 1 to 6"),
        (QueueRequest { depth: 65, ..of(ONE, 1) }, "session.queue_depth"),
        (QueueRequest { depth: 1, ..of(ONE, 1) }, "expected 2 to 64"),
        (QueueRequest { memory: MemoryNumber(2), ..of(ONE, 1) }, "memory 2 is not registered"),
        (of(SessionId(9), 1), "memory 1 is not registered"),
    ] {
        let refusal = table.request(request, SERIAL).expect_err("refused");
        assert!(matches!(&refusal, QueueGrantRefusal::Invalid(text) if text.contains(words)), "{refusal}");
    }
    let mut none = QueueGrants::new(QueueGrantLimits { pairs_per_device: 0, ..LIMITS });
    let refusal = none.register(ONE, 4096).expect_err("disabled");
    assert!(refusal.to_string().contains("session.queue_pairs"), "{refusal}");
}

#[test]
fn sessions_share_the_queue_pairs_of_a_device() {
    let mut table = table();
    let first = granted(&mut table, of(ONE, 6));
    let refusal = table.request(of(ONE, 1), SERIAL).expect_err("its share");
    assert!(matches!(&refusal, QueueGrantRefusal::Exhausted(text) if text.contains("this session")));
    let refusal = table.request(of(TWO, 3), SERIAL).expect_err("two are left");
    assert!(matches!(&refusal, QueueGrantRefusal::Exhausted(text) if text.contains("all sessions")));
    granted(&mut table, of(TWO, 2));
    granted(&mut table, QueueRequest { device: 4, ..of(TWO, 6) });
    assert!(table.begin_end(ONE, first));
    table.request(of(TWO, 1), SERIAL).expect_err("the queue pairs are not deleted yet");
    table.ended(first);
    granted(&mut table, of(TWO, 1));
    assert_eq!(table.pairs(), 9);
}

#[test]
fn controller_has_queue_pairs_of_one_tenant() {
    let mut table = table();
    let foreign = QueueRequest { tenant: TenantId(2), ..of(TWO, 1) };
    let first = granted(&mut table, of(ONE, 1));
    let refusal = table.request(foreign, SERIAL).expect_err("of another tenant");
    assert!(
        matches!(&refusal, QueueGrantRefusal::Exhausted(text) if text.contains("virtual function")),
        "{refusal}"
    );
    granted(&mut table, of(TWO, 1));
    granted(&mut table, QueueRequest { device: 4, ..foreign });
    // An unconfirmed deletion keeps the device, because commands may still run.
    assert_eq!(table.begin_session_end(TWO).len(), 2);
    table.register(TWO, 4096).expect("registered again");
    table.not_confirmed(GrantGeneration(2));
    assert!(table.begin_end(ONE, first));
    table.ended(first);
    table.request(QueueRequest { memory: MemoryNumber(1), ..foreign }, SERIAL).expect_err("unconfirmed");
    table.device_reset(3);
    table.request(foreign, SERIAL).expect("the controller was reset");
    table.request(of(ONE, 1), SERIAL).expect_err("the device has another tenant now");
}

#[test]
fn an_ended_generation_reaches_no_later_grant() {
    let mut table = table();
    let first = granted(&mut table, of(ONE, 1));
    assert!(!table.begin_end(TWO, first), "the grant of another session");
    assert!(table.begin_end(ONE, first));
    assert!(!table.begin_end(ONE, first), "it is ending");
    table.ended(first);
    let second = granted(&mut table, of(ONE, 1));
    assert!(second > first && !table.begin_end(ONE, first));
    assert_eq!(table.begin_revocation(3), [(second, ONE)]);
    assert!(!table.begin_end(ONE, second), "it was revoked");
}

#[test]
fn a_session_is_fenced_until_its_queue_pairs_are_gone_for_certain() {
    let mut table = table();
    let (first, second) = (granted(&mut table, of(ONE, 1)), granted(&mut table, of(ONE, 2)));
    granted(&mut table, of(TWO, 1));
    assert_eq!(table.begin_session_end(ONE), [first, second]);
    table.ended(first);
    table.not_confirmed(second);
    assert!(table.is_fenced(ONE) && !table.is_fenced(TWO));
    assert_eq!(table.pairs(), 3, "unconfirmed queue pairs stay counted");
    table.device_reset(3);
    assert!(!table.is_fenced(ONE));
    assert_eq!(table.pairs(), 1, "the grant of the other session");
}

#[test]
fn reset_of_a_device_ends_unconfirmed_grants_only() {
    let mut table = table();
    let (first, second) = (granted(&mut table, of(ONE, 1)), granted(&mut table, of(ONE, 1)));
    let other = granted(&mut table, QueueRequest { device: 4, ..of(ONE, 1) });
    assert_eq!(table.begin_session_end(ONE), [first, second, other]);
    assert!(table.is_fenced(ONE), "queue pairs are being deleted");
    table.not_confirmed(first);
    table.not_confirmed(other);
    assert_eq!(table.end_of(ONE, first), GrantEnd::Unconfirmed);
    assert_eq!(table.end_of(TWO, first), GrantEnd::Ended, "the grant of another session");
    table.device_reset(3);
    assert_eq!(table.end_of(ONE, first), GrantEnd::Ended);
    assert_eq!(table.end_of(ONE, second), GrantEnd::Pending);
    // The replacement has all its queue pairs, and its end does not reach the earlier grant.
    granted(&mut table, of(TWO, 6));
    assert_eq!(table.begin_revocation(3).len(), 1);
    table.not_confirmed(second);
    assert_eq!(table.end_of(ONE, second), GrantEnd::Ended, "its controller was reset");
    assert!(table.is_fenced(ONE), "the controller of the other device was not");
    table.device_reset(4);
    assert!(!table.is_fenced(ONE));
}

#[test]
fn memories_are_limited_in_number_and_size() {
    let mut table = table();
    table.register(ONE, MEMORY_BYTES_MAX).expect_err("with the first one, it is too large");
    for _ in 1..MEMORIES_PER_SESSION_MAX {
        table.register(ONE, 4096).expect("within the limit");
    }
    table.register(ONE, 4096).expect_err("too many");
    table.unregister(ONE, MemoryNumber(2));
    assert_eq!(table.register(ONE, 4096), Ok(MemoryNumber(17)), "numbers are not used again");
    table.begin_session_end(ONE);
    assert_eq!(table.memory_bytes(), 4096, "the memory of the other session");
}

proptest! {
    /// Random steps: no limit is exceeded, and everything ends with the sessions.
    #[test]
    fn limits_hold_in_every_order_of_steps(steps in proptest::collection::vec((0..5u8, 1..4u64, 0..3u8, 1..7u32), 1..80)) {
        let mut table = QueueGrants::new(LIMITS);
        let mut live: Vec<(GrantGeneration, SessionId)> = Vec::new();
        for session in 1..4 {
            table.register(SessionId(session), 4096).expect("registered");
        }
        for (step, session, device, pairs) in steps {
            let session = SessionId(session);
            match step {
                0 | 1 => {
                    let request = QueueRequest { device, tenant: tenant_of(session), ..of(session, pairs) };
                    if let Ok(generation) = table.request(request, SERIAL) {
                        prop_assert!(live.iter().all(|(other, _)| *other < generation));
                        table.created(generation);
                        live.push((generation, session));
                    }
                }
                2 => {
                    if let Some((generation, owner)) = live.pop() {
                        prop_assert!(table.begin_end(owner, generation));
                        table.ended(generation);
                    }
                }
                3 => {
                    let ending = table.begin_revocation(device);
                    for (generation, owner) in &ending {
                        prop_assert!(live.contains(&(*generation, *owner)));
                        table.ended(*generation);
                    }
                    live.retain(|one| !ending.contains(one));
                }
                _ => {
                    let ending = table.begin_session_end(session);
                    ending.iter().for_each(|generation| table.ended(*generation));
                    live.retain(|(_, owner)| *owner != session);
                    table.register(session, 4096).expect("registered again");
                }
            }
            for device in 0..3 {
                let on_device = table.iter().map(|(_, request)| request).filter(|request| request.device == device);
                let mut tenants: Vec<_> = on_device.map(|request| request.tenant).collect();
                tenants.dedup();
                prop_assert!(tenants.len() <= 1, "{tenants:?} on device {device}");
                let pairs = |of: Option<SessionId>| -> u32 {
                    let counts = |request: &&QueueRequest| {
                        request.device == device && of.is_none_or(|session| session == request.session)
                    };
                    table.iter().map(|(_, request)| request).filter(counts).map(|request| request.pairs).sum()
                };
                prop_assert!(pairs(None) <= LIMITS.pairs_per_device);
                prop_assert!((1..4).all(|session| pairs(Some(SessionId(session))) <= LIMITS.pairs_per_session));
            }
            prop_assert_eq!(table.iter().count(), live.len());
        }
    }
}
