from kvstow.pool.policy.base import MAX_LEASED_SKIPS
from kvstow.pool.policy.s3fifo import MAX_STEPS, S3FIFO
from tests.unit.pool.policy.keys import always, key, keys, never


def held(names: str, *, touched: str = "", times: int = 2) -> S3FIFO:
    policy = S3FIFO()
    for name in keys(names):
        policy.insert(name)
    for _ in range(times):
        policy.touch_many(keys(touched))
    return policy


def test_of_keys_used_once_the_oldest_goes_first() -> None:
    policy = held("abc", touched="a", times=1)
    assert [policy.victim(always) for _ in range(4)] == [*keys("abc"), None]


def test_a_key_used_more_than_once_outlives_those_that_came_after_it() -> None:
    policy = held("abc", touched="a")
    assert [policy.victim(always) for _ in range(3)] == keys("bca")


def test_a_key_that_comes_back_soon_goes_to_the_main_queue() -> None:
    policy = held("abcdefghij")
    assert policy.victim(always) == key("a")
    policy.insert(key("a"))
    for name in keys("klm"):
        policy.insert(name)
    assert [policy.victim(always) for _ in range(13)] == keys("bcdefghijklma")


def test_a_removed_key_is_not_remembered() -> None:
    policy = held("abcdefghij")
    assert policy.victim(always) == key("a")
    policy.remove(key("a"))
    policy.insert(key("a"))
    assert [policy.victim(always) for _ in range(10)] == keys("bcdefghija")


def test_the_ghost_is_bounded_by_what_is_held() -> None:
    policy = held("abcd")
    for i in range(1000):
        policy.insert(key(f"scan {i}"))
        assert policy.victim(always) is not None
    assert len(policy._ghost) <= len(policy) == 4


def test_uses_in_the_main_queue_are_capped_and_spent() -> None:
    policy = held("ab", touched="ab")
    assert policy.victim(always) == key("a")  # both were promoted; neither was used since
    policy = held("ab", touched="ab")
    policy.insert(key("c"))
    policy.touch_many(keys("c") * 2)
    assert policy.victim(always) == key("a")
    for _ in range(100):
        policy.touch(key("b"))
    policy.touch(key("c"))
    assert [policy.victim(always), policy.victim(always)] == keys("cb")


def test_sizes_set_the_small_queues_share() -> None:
    policy = S3FIFO()
    policy.insert(key("m"), 1000)
    policy.touch_many(keys("mm"))
    policy.insert(key("n"), 1)
    policy.touch_many(keys("nn"))
    assert policy.victim(always) == key("m")  # first m, then n moved to main; m is the older
    policy.insert(key("s"), 100)
    policy.insert(key("t"), 10_000)
    assert policy.victim(always) == key("s")
    assert policy.victim(always) == key("t")
    assert policy.victim(always) == key("n")


def test_a_small_queue_within_its_share_is_left_alone() -> None:
    policy = S3FIFO()
    policy.insert(key("m"), 1000)
    policy.touch_many(keys("mm"))
    policy.insert(key("x"), 1)
    assert policy.victim(always) == key("m")  # moved to main, which then is over its share


def test_keys_that_are_not_held_are_ignored() -> None:
    policy = held("ab")
    policy.touch(key("x"))
    policy.touch_many(keys("xyz"))
    policy.remove(key("x"))
    assert (len(policy), key("x") in policy, key("a") in policy) == (2, False, True)
    policy.remove(key("a"))
    assert policy.victim(always) == key("b")


def test_a_leased_key_is_passed_over_in_both_queues() -> None:
    policy = held("abcd", touched="ab")
    assert policy.victim(lambda k: k == key("b")) == key("b")
    assert policy.victim(lambda k: k == key("d")) == key("d")
    assert sorted(name for name in keys("ac") if name in policy) == keys("ac")


def test_keys_in_main_are_found_when_all_of_small_is_leased_and_the_other_way_round() -> None:
    policy = held("abcdef", touched="ab")
    small = set(keys("cdef"))
    assert policy.victim(lambda k: k not in small) == key("a")
    policy = held("abcdef", touched="abcde")
    main = set(keys("abcde"))
    assert policy.victim(lambda k: k not in main) == key("f")


def test_an_often_used_key_beside_leased_ones_is_found() -> None:
    policy = held("ab", touched="ab")
    assert policy.victim(never) is None  # both are in main now
    policy.touch_many(keys("bbb"))
    assert policy.victim(lambda k: k == key("b")) == key("b")


def test_g8_g9_a_search_among_leased_keys_is_bounded() -> None:
    policy = S3FIFO()
    leased = [key(str(i)) for i in range(2 * MAX_LEASED_SKIPS)]
    for name in leased:
        policy.insert(name)
    asked: list[object] = []

    def evictable(k: object) -> bool:
        asked.append(k)
        return False

    assert policy.victim(evictable) is None
    assert len(asked) == MAX_LEASED_SKIPS
    assert len(policy) == len(leased)


def test_a_search_among_often_used_keys_is_bounded() -> None:
    """Past the bound uses no longer protect: something goes."""
    policy = S3FIFO()
    names = [key(str(i)) for i in range(2 * MAX_STEPS)]
    for name in names:
        policy.insert(name)
    policy.touch_many(names * 3)
    assert policy.victim(always) == names[MAX_STEPS]


def test_nothing_to_evict() -> None:
    assert S3FIFO().victim(always) is None
    policy = held("ab")
    assert policy.victim(never) is None
    assert len(policy) == 2
