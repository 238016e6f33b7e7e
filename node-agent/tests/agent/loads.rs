//! Loads: from DRAM and NVMe, layer by layer, and what happens to blocks that are gone or damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use reprise_client::{BlockStatus, LoadRequest, Scope, Source};

use crate::blocks::{
    PATIENCE, connect, connect_with, keys, layout_of, load, load_all, object, save, save_durably, verify,
};
use crate::process::{Config, Home};

#[test]
fn a_block_is_found_in_dram_then_on_nvme_and_its_bytes_are_the_same() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..50);
    let dram = client.match_keys(&keys(0..51), Scope::Local).expect("an answer");
    assert_eq!(dram, vec![Source::OwnDram; 50], "block 50 was never saved, so the match ends before it");
    load_all(&client, 0..50);
    client.trim().expect("trimmed");
    let nvme = client.match_keys(&keys(0..50), Scope::Local).expect("an answer");
    assert_eq!(nvme, vec![Source::OwnNvme; 50]);
    load_all(&client, 0..50);
    assert_eq!(agent.counter("device_fills"), 50);
    assert_eq!(home.complaints(), Vec::<String>::new());
}

#[test]
fn layers_arrive_in_order_and_each_is_readable_when_it_is_announced() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    // 32 layers of 2 × 16 KiB: 1 MiB a block.
    let layout = layout_of(32, 512);
    let client = connect_with(&agent.socket, layout);
    let numbers: Vec<u64> = (0..12).collect();
    save_durably(&client, numbers.iter().copied());
    client.trim().expect("trimmed");
    let mut request = LoadRequest::new(keys(numbers.iter().copied()));
    request.read_bytes = 32 << 10;
    let load = client.load(&request).expect("an answer");
    let mut copy = vec![0; layout.object_bytes() as usize];
    let mut announced = 0;
    for layer in 0..layout.layers() {
        let ready = load.wait_layer(layer, PATIENCE).expect("the layer").layers;
        assert!(ready > layer && ready >= announced, "layers never go back");
        announced = ready;
        for (block, number) in numbers.iter().enumerate() {
            for index in [2 * layer, 2 * layer + 1] {
                load.copy_object(block, index, &mut copy).expect("a verified copy");
                assert!(copy == object(&layout, *number, index));
            }
        }
    }
}

#[test]
fn a_block_that_nobody_has_is_a_miss_at_once() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..2);
    let (held, statuses) = load(&client, &[0, 99, 1]);
    assert_eq!(statuses, [BlockStatus::Ok, BlockStatus::Miss, BlockStatus::Ok]);
    assert_eq!(verify(&client, &held, &[0, 99, 1]), 2);
}

#[test]
fn two_sessions_that_want_the_same_cold_blocks_read_them_once() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..64);
    client.trim().expect("trimmed");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let socket = &agent.socket;
            scope.spawn(move || load_all(&connect(socket), 0..64));
        }
    });
    assert_eq!(agent.counter("device_fills"), 64);
    assert_eq!(agent.counter("hit_blocks_own_dram") + agent.counter("hit_blocks_own_nvme"), 4 * 64);
}

#[test]
fn a_flipped_bit_on_the_device_is_a_failed_block_and_is_never_served() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..10);
    assert_eq!(agent.terminate().code(), Some(0));
    // Find the payload of block 3 on the device by its first object, and flip one bit of its last object.
    let layout = *client.layout();
    let wanted = object(&layout, 3, 0);
    let pool = File::options().read(true).write(true).open(home.pool()).expect("the pool");
    let mut page = vec![0; 4096];
    let size = pool.metadata().expect("a size").len();
    let found = (0..size).step_by(4096).find(|offset| {
        pool.read_exact_at(&mut page, *offset).expect("read");
        page == wanted
    });
    let at = found.expect("block 3 is on the device") + layout.block_bytes() - 100;
    let mut byte = [0];
    pool.read_exact_at(&mut byte, at).expect("read");
    pool.write_all_at(&[byte[0] ^ 4], at).expect("written");
    pool.sync_all().expect("synced");
    drop(pool);
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    let numbers: Vec<u64> = (0..10).collect();
    let (held, statuses) = load(&client, &numbers);
    for (number, status) in statuses.iter().enumerate() {
        assert_eq!(
            *status,
            if number == 3 { BlockStatus::Failed } else { BlockStatus::Ok },
            "block {number}"
        );
    }
    assert_eq!(verify(&client, &held, &numbers), 9);
    drop(held);
    assert_eq!(
        client.match_keys(&keys([3]), Scope::Local).expect("an answer"),
        [],
        "a damaged block is forgotten"
    );
    assert_eq!(agent.counter("corrupt_blocks"), 1);
    assert!(home.log_text().contains("did not verify"));
    // It can be saved again, to another place.
    save_durably(&client, [3]);
    client.trim().expect("trimmed");
    load_all(&client, [3]);
}

#[test]
fn a_full_arena_gives_fewer_slots_and_recovers_when_they_are_given_back() {
    let home = Home::new();
    let agent = home.start(&Config { pool: None, ..Config::default() });
    let client = connect(&agent.socket);
    let mut held = Vec::new();
    loop {
        let more = client.reserve(1000, Duration::ZERO).expect("an answer");
        if more.is_empty() {
            break;
        }
        held.extend(more);
    }
    assert!((100..=512).contains(&held.len()), "32 MiB hold 512 blocks of 64 KiB: {}", held.len());
    drop(held);
    agent.await_counter("reserved_bytes", 0);
    save(&client, 0..50);
    load_all(&client, 0..50);
}
