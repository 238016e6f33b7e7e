//! Runs tests on a new store of each kind.

use std::path::Path;
use std::sync::Arc;

use reprise_controlplane_store::{EmbeddedStore, EtcdSettings, EtcdStore, MemoryStore, Store};
use reprise_testkit::etcd::Etcd;

/// A new store, and the server that it needs, if any.
type Opened = (Arc<dyn Store>, Option<Etcd>);

/// One module for each store, with one test for each of these functions. The brackets hold the arguments of the
/// runtime for stores in this process.
macro_rules! on_every_store {
    ($local:tt; $($test:ident,)*) => {
        on_every_store!(@store memory $local; $($test,)*);
        on_every_store!(@store embedded $local; $($test,)*);
        on_every_store!(@store etcd [flavor = "multi_thread", worker_threads = 2]; $($test,)*);
    };
    (@store $store:ident $runtime:tt; $($test:ident,)*) => {
        mod $store {
            use crate::every_store::on_every_store;

            $(on_every_store!(@test $store $runtime $test);)*
        }
    };
    (@test $store:ident [$($runtime:tt)*] $test:ident) => {
        #[tokio::test($($runtime)*)]
        async fn $test() {
            let directory = tempfile::tempdir().expect("a directory");
            let (store, _server) = crate::every_store::$store(directory.path()).await;
            super::$test(store).await;
        }
    };
}
pub(crate) use on_every_store;

/// Returns settings to connect to an etcd.
pub(crate) fn settings(server: &Etcd, prefix: &str) -> EtcdSettings {
    EtcdSettings { endpoints: vec![server.endpoint()], prefix: prefix.to_owned(), user: None, tls: None }
}

pub(crate) async fn memory(_: &Path) -> Opened {
    (Arc::new(MemoryStore::new()), None)
}

pub(crate) async fn embedded(folder: &Path) -> Opened {
    (Arc::new(EmbeddedStore::open(&folder.join("store")).expect("a new store")), None)
}

pub(crate) async fn etcd(folder: &Path) -> Opened {
    let server = Etcd::start_in(folder);
    let store = EtcdStore::connect(&settings(&server, "/reprise/")).await.expect("etcd answers");
    (Arc::new(store), Some(server))
}
