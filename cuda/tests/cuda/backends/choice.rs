//! Which backend is opened, and why the ones before it are not.

use reprise_cuda::store::verify::{device_bytes, geometries};
use reprise_cuda::store::{CuFile, GdsMover, KvGeometry, KvMemory, Means, Unusable, open_backend};

use super::rig::{FakeCuFile, OPEN_LIMIT, folder, lent_file, memory};

fn means(geometry: KvGeometry) -> Means<'static> {
    let missing = |what: &str| format!("no {what}; ask the agent");
    Means {
        geometry,
        memory: KvMemory::Host(memory(geometry.bytes())),
        rings: Err(missing("queue pairs")),
        files: Err(missing("files")),
        slots: Err(missing("slots")),
    }
}

fn texts(unusable: &[Unusable]) -> Vec<String> {
    unusable.iter().map(ToString::to_string).collect()
}

#[test]
fn files_open_the_staged_backend_and_slots_the_host_backend() {
    let (geometry, folder) = (geometries(2)[0].1, folder());
    let file = lent_file(&folder.path().join("device"), device_bytes(&geometry));
    let choice = open_backend(Means { files: Ok(vec![file]), ..means(geometry) }).expect("opened");
    assert_eq!(choice.backend.name(), "staged-host");
    let gds = "gds is not used: KV memory is not of a GPU; use an engine that runs on a GPU";
    let rings = "gpu-queue is not used: no queue pairs; ask the agent";
    assert_eq!(texts(&choice.unusable), [rings, gds]);

    let slots = Ok(vec![memory(device_bytes(&geometry))]);
    let choice = open_backend(Means { slots, ..means(geometry) }).expect("opened");
    assert_eq!(choice.backend.name(), "host");
    assert_eq!(texts(&choice.unusable), [rings, gds, "staged is not used: no files; ask the agent"]);

    let none =
        open_backend(Means { rings: Ok(Vec::new()), ..means(geometry) }).expect_err("nothing is there");
    assert_eq!(none.len(), 4);
    assert!(none[0].reason.contains("set session.queue_pairs of the agent"), "{}", none[0]);
}

#[test]
fn file_without_direct_io_or_objects_of_parts_of_pages_are_reasons() {
    let (geometry, folder) = (geometries(2)[0].1, folder());
    let path = folder.path().join("device");
    let direct = || lent_file(&path, device_bytes(&geometry));
    drop(direct());
    let buffered = std::fs::File::options().read(true).write(true).open(&path).expect("a file");
    let slots = || Ok(vec![memory(device_bytes(&geometry))]);
    let choice = Means { files: Ok(vec![buffered]), slots: slots(), ..means(geometry) };
    let choice = open_backend(choice).expect("opened");
    assert!(choice.unusable[2].reason.contains("not open for direct I/O"), "{}", choice.unusable[2]);

    let small = KvGeometry { object_bytes: 1024, ..geometry };
    let choice = Means { files: Ok(vec![direct()]), slots: slots(), ..means(small) };
    let choice = open_backend(choice).expect("opened");
    assert!(choice.unusable[2].reason.contains("use more tokens per block"), "{}", choice.unusable[2]);
}

#[test]
fn cufile_that_cannot_be_used_is_a_reason_with_the_remedy() {
    let cases = [
        (vec!["OPENED=5001"], "load the kernel module nvidia-fs"),
        (vec!["OPENED=5011"], "the GPU's driver has returned 0; check nvidia-smi"),
        (vec!["HANGS"], "cuFileDriverOpen has not returned within 2s"),
        (vec!["SUPPORTED=0"], "check with gdscheck -p"),
        (vec!["WITHOUT_WRITE"], "libcufile lacks the function cuFileWrite; install"),
    ];
    for (macros, expected) in cases {
        let reason = FakeCuFile::new(&macros).load().expect_err("unusable");
        assert!(reason.contains(expected), "{macros:?}: {reason}");
    }
    // SAFETY: no file is loaded.
    let reason =
        unsafe { CuFile::load_from("/nonexistent/libcufile.so.0", OPEN_LIMIT) }.expect_err("no file");
    assert!(reason.contains("cannot load /nonexistent/libcufile.so.0"), "{reason}");
}

#[test]
fn file_system_without_gpudirect_storage_is_a_reason() {
    let (geometry, folder) = (geometries(2)[0].1, folder());
    let library = FakeCuFile::new(&["REGISTERED=5008"]).load().expect("loaded");
    let file = lent_file(&folder.path().join("device"), device_bytes(&geometry));
    let kv = KvMemory::Host(memory(geometry.bytes()));
    let refused = GdsMover::new(&library, geometry, &kv, vec![file]).expect_err("unsupported").to_string();
    assert!(refused.contains("has no GPUDirect Storage: use ext4 or XFS on NVMe"), "{refused}");
}
